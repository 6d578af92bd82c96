"""What outlives a step on the device, as bookkeeping: KV blocks, the prefix cache, the encoder cache."""

"""Bookkeeping of what outlives a step on the device: KV blocks, the prefix cache, the encoder cache."""

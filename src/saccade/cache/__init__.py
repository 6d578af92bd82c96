"""Bookkeeping of device memory that outlives a step: KV blocks, the prefix cache, the encoder cache."""

"""Which graph a batch is run in: keys, buckets, measured costs and decisions. Knows no tensors."""

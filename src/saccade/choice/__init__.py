"""Which graph a batch runs in: keys, buckets, measured costs and decisions. Knows no tensors."""

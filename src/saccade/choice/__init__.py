"""Decides which graph a batch runs in: keys, buckets, measured costs. Knows no tensors."""

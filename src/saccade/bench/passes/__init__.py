"""Benchmarks of single passes: `saccade bench offline`, `vision`, `graphs` and `allreduce`."""

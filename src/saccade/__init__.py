"""Serves vision-language models: every forward pass is a CUDA-graph replay, and every replay is the right one."""

__version__ = "0.1.0.dev0"

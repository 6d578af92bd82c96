"""Layers that know their shard and run inside a graph: everything that varies reaches them as a tensor."""

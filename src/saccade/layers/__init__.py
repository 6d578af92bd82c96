"""Sharded layers that can run inside a graph: everything that varies is passed as a tensor."""

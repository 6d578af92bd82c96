"""What the stand-in counted in this process."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch


class Device:
    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        for name in ("replays", "mallocs", "modules"):
            self._function(name).restype = ctypes.c_ulonglong
        for name in ("violation", "node"):
            self._function(name).restype = ctypes.c_char_p

    def count(self, name: str) -> int:
        return int(self._function(name)())

    def violations(self) -> list[str]:
        return [self._function("violation")(index).decode() for index in range(self.count("num_violations"))]

    def nodes(self, graphs: Sequence[int]) -> list[str]:
        """Of graphs by their numbers: those of a pass cut in pieces are several."""
        node, num_nodes = self._function("node"), self._function("num_nodes")
        return [node(graph, index).decode() for graph in graphs for index in range(num_nodes(graph))]

    def work(self, name: str) -> None:
        """Puts work on the current stream."""
        self._function("work")(ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), name.encode())

    def _function(self, name: str) -> Any:
        return getattr(self._library, f"standin_{name}")

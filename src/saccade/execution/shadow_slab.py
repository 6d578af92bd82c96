"""Memory for copies of what passes read and gave, allocated once."""

from collections import deque
from collections.abc import Mapping
from math import prod
from typing import Protocol

import torch
from torch import Tensor

ALIGNMENT_BYTES = 256


class Owner(Protocol):
    """Whose copies lie in a slab. It is lost when newer ones took their place."""

    is_lost: bool


class Slab:
    """A ring of bytes on the device: the oldest copies make room for new ones.

    All copies into one slab are queued on one stream, so that none is overwritten by an older one.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._bytes = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._regions: deque[tuple[int, int, Owner]] = deque()  # the oldest first
        self._cursor = 0

    @property
    def nbytes(self) -> int:
        return self._bytes.nbytes

    @property
    def most_bytes(self) -> int:
        """Of one result: of a larger one, rows from all over it are kept."""
        return self.nbytes // 4

    def copy(self, owner: Owner, tensors: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Queue copies of these tensors; None where the slab has no room for all that is this owner's."""
        sizes = {name: -(-_nbytes(tensor) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for name, tensor in tensors.items()}
        start = self._reserve(owner, sum(sizes.values()))
        if start is None:
            return None
        copies = {}
        for name, tensor in tensors.items():
            room = self._bytes[start : start + _nbytes(tensor)].view(tensor.dtype).view(tensor.shape)
            copies[name] = room.copy_(tensor, non_blocking=True)
            start += sizes[name]
        return copies

    def _reserve(self, owner: Owner, nbytes: int) -> int | None:
        if nbytes > self.nbytes:
            return None
        start = self._cursor if self._cursor + nbytes <= self.nbytes else 0
        stop = start + nbytes
        while any(begin < stop and start < end for begin, end, _ in self._regions):
            self._regions.popleft()[2].is_lost = True
        self._regions.append((start, stop, owner))
        self._cursor = stop
        return None if owner.is_lost else start


def _nbytes(tensor: Tensor) -> int:
    return prod(tensor.shape) * tensor.itemsize

"""All-reduce and all-gather over the ranks, inside or outside a graph.

A rank is a process with one device. All ranks make the same calls in the same order on one stream, with tensors of the
same shape and dtype, and get the same bits. Tensors pass through memory that is reserved once, before any capture,
because graphs hold its address.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from saccade.errors import AddressError

INT64_MAX = 2**63 - 1


class Collectives(ABC):
    """All-reduce and all-gather over one communicator, which serves one stream."""

    memory: Tensor

    @property
    @abstractmethod
    def algorithms(self) -> tuple[str, ...]:
        """The available all-reduce algorithms. Valid after `reserve`."""

    def taken(self, nbytes: int) -> str:
        """The algorithm that `all_reduce` uses for a tensor of this size."""
        return self.algorithms[0]

    @abstractmethod
    def reserve(self, nbytes: int) -> None:
        """Reserves memory for the largest tensor that a rank will pass. Called once, before any capture."""

    def staging(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """A buffer from which `all_reduce` reads its input without a copy; None if no place is better than another."""
        return None

    @abstractmethod
    def all_reduce(self, x: Tensor, out: Tensor | None = None, *, algorithm: str = "") -> Tensor:
        """The sum over the ranks, in a new tensor or in `out`, which may be x. The fastest algorithm is the default."""

    @abstractmethod
    def all_gather(self, x: Tensor, dim: int, out: Tensor | None = None) -> Tensor:
        """The ranks' tensors, concatenated along `dim` in rank order, in a new tensor or in `out`."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The backend in use and the reason for it, as plain values."""


class Control:
    """Communication between the ranks' hosts, outside passes."""

    def __init__(self, world: ProcessGroup) -> None:
        self.size = world.size()
        self._world = world

    def barrier(self) -> None:
        self.agree(0)

    def agree(self, value: int) -> int:
        """The minimum over the ranks."""
        assert abs(value) <= INT64_MAX, f"{value} does not fit into 64 bits"
        found = torch.tensor(value, dtype=torch.int64)
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self._world)
        return int(found)

    def all_equal(self, data: bytes) -> bool:
        """Whether all ranks passed the same bytes."""
        return len(set(self.gather(hashlib.sha256(data).digest()))) == 1

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order."""
        most = -self.agree(-len(data))
        mine = torch.zeros(8 + most, dtype=torch.uint8)
        mine[:8] = torch.tensor([len(data)], dtype=torch.int64).view(torch.uint8)
        mine[8 : 8 + len(data)] = torch.tensor(list(data), dtype=torch.uint8)
        found = torch.empty(self.size * mine.numel(), dtype=torch.uint8)
        self._world._allgather_base(found, mine).wait()
        rows = found.view(self.size, -1)
        lengths = rows[:, :8].contiguous().view(torch.int64).flatten().tolist()
        return [bytes(row[8 : 8 + length].tolist()) for row, length in zip(rows, lengths, strict=True)]

    def broadcast(self, value: Any) -> Any:
        """Returns rank 0's value on every rank. It must be JSON-serialisable."""
        return json.loads(self.gather(json.dumps(value).encode())[0])


@dataclass(frozen=True, slots=True)
class AlgorithmChoice:
    """An algorithm for tensors of at most `up_to_bytes` (None means no limit)."""

    algorithm: str
    up_to_bytes: int | None = None


def fastest(timings: Mapping[int, Mapping[str, float]]) -> tuple[AlgorithmChoice, ...]:
    """`timings` maps bytes and algorithm to microseconds. A tensor uses the fastest algorithm of the next larger
    measured size, or of the largest one."""
    sizes = sorted(timings)
    best = [min(timings[size], key=lambda name: timings[size][name]) for size in sizes]
    found: list[AlgorithmChoice] = []
    for i, (size, name) in enumerate(zip(sizes, best, strict=True)):
        is_last = all(later == name for later in best[i:])
        if is_last:
            return (*found, AlgorithmChoice(name))
        if best[i + 1] != name:
            found.append(AlgorithmChoice(name, size))
    return tuple(found)


def choose(choices: Sequence[AlgorithmChoice], nbytes: int) -> str:
    """Depends only on the size, so graph and eager passes use the same algorithm."""
    return next(c.algorithm for c in choices if c.up_to_bytes is None or nbytes <= c.up_to_bytes)


def check_room(nbytes: int, capacity: int) -> None:
    if nbytes > capacity:
        raise AddressError(
            f"a rank passes {nbytes} bytes and {capacity} are reserved; reserve memory for the largest pass before the "
            "first capture, because every graph holds its address"
        )

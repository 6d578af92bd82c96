"""Declarations of static buffers: what each holds, which axis varies, and how it is padded."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod

import torch

from saccade.errors import ConfigError


class Role(StrEnum):
    INPUT = "input"  # filled on the device: copied from a tensor, or written in place by a kernel
    METADATA = "metadata"  # filled on the host; all of a batch's metadata goes in one copy
    BRIDGE = "bridge"  # written by the body: a tensor that crosses a graph break, or a wide temporary; layers share it
    OUTPUT = "output"  # written by the body; valid until the next replay


@dataclass(frozen=True, slots=True)
class Fill:
    """Padded rows hold a constant: zero, or a sentinel such as a slot of the reserved block."""

    value: float = 0


@dataclass(frozen=True, slots=True)
class OwnIndex:
    """Padded entries hold their own index, so that a permutation of the valid rows becomes one of all rows."""


@dataclass(frozen=True, slots=True)
class DummySegment:
    """Padding of boundaries: the padded rows form a segment of their own, followed by empty segments. So every row lies
    in a segment, the last boundary is always the row capacity, and no segment mixes valid and padded rows. Where a
    kernel takes segments of at most `longest` rows (windows), the padded rows form as many as needed."""

    rows: str
    longest: int | None = None


Padding = Fill | OwnIndex | DummySegment
ZERO = Fill(0)


@dataclass(frozen=True, slots=True)
class Buffer:
    """One static buffer. A string in `shape` names a dimension (`"tokens"`, or `"segments+1"`); at most one varies."""

    name: str
    shape: tuple[int | str, ...]
    dtype: torch.dtype
    role: Role
    padding: Padding = ZERO
    axis: int | None = field(init=False, repr=False)  # the axis that varies
    # the dimension of that axis, and what is added to its size: "segments+1" -> ("segments", 1)
    dimension: tuple[str, int] | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        axis = next((axis for axis, size in enumerate(self.shape) if isinstance(size, str)), None)
        name, _, extra = ("" if axis is None else str(self.shape[axis])).partition("+")
        object.__setattr__(self, "axis", axis)
        object.__setattr__(self, "dimension", (name, int(extra or 0)) if name else None)
        if sum(isinstance(size, str) for size in self.shape) > 1:
            raise ConfigError(f"buffer {self.name!r} varies in several axes of {self.shape}; at most one may")
        what = {DummySegment: "boundaries", OwnIndex: "a permutation"}.get(type(self.padding))
        if what and (self.role is not Role.METADATA or len(self.shape) != 1):
            raise ConfigError(f"buffer {self.name!r} holds {what}: declare it one-dimensional metadata")

    def sized(self, capacity: Mapping[str, int]) -> tuple[int, ...]:
        if self.dimension is None or self.axis is None:
            return tuple(int(size) for size in self.shape)
        name, extra = self.dimension
        sizes = list(self.shape)
        sizes[self.axis] = capacity[name] + extra
        return tuple(int(size) for size in sizes)

    def numel(self, capacity: Mapping[str, int]) -> int:
        return prod(self.sized(capacity))

    def nbytes(self, capacity: Mapping[str, int]) -> int:
        return self.numel(capacity) * self.dtype.itemsize


BufferShape = tuple[int | str, ...]


def rows(name: str, shape: BufferShape, dtype: torch.dtype, *, padding: Padding = ZERO) -> Buffer:
    """An input that lives on the device."""
    return Buffer(name, shape, dtype, Role.INPUT, padding)


def metadata(name: str, shape: BufferShape, dtype: torch.dtype = torch.int32, *, padding: Padding = ZERO) -> Buffer:
    """An input that is made on the host."""
    return Buffer(name, shape, dtype, Role.METADATA, padding)


def boundaries(name: str, *, of: str, count: str, longest: int | None = None) -> Buffer:
    """Cumulative lengths `[0, ..., total]` that cut the rows of dimension `of` into `count` segments. `longest` limits
    the rows of a segment, for kernels that rely on a limit."""
    return Buffer(name, (f"{count}+1",), torch.int32, Role.METADATA, DummySegment(of, longest))


def bridge(name: str, shape: BufferShape, dtype: torch.dtype) -> Buffer:
    """Carries tensors across a break of a piecewise graph, or is a temporary that all layers share."""
    return Buffer(name, shape, dtype, Role.BRIDGE)


def output(name: str, shape: BufferShape, dtype: torch.dtype) -> Buffer:
    return Buffer(name, shape, dtype, Role.OUTPUT)

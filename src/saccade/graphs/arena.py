"""The arena: static buffers, allocated once, and the only code that writes batches into them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.choice.key import Capacity
from saccade.choice.shape import Boundary, misfit
from saccade.errors import ConfigError, GraphError
from saccade.graphs.buffers import Buffer, DummySegment, Fill, Role
from saccade.graphs.staging import HostArray, SlabLayout, Staging, numpy_dtype

__all__ = ["Arena", "Batch", "HostArray"]

# Sizes recur, so whatever depends only on them is cached. The caches are bounded: eager runs may have any size.
MAX_LAYOUTS = 1024
MAX_SIZES = 4096


@dataclass(frozen=True, slots=True)
class Batch:
    """An admitted batch: valid rows only, consistent sizes, boundaries checked on the host."""

    tensors: Mapping[str, Tensor]
    arrays: Mapping[str, HostArray]
    sizes: Capacity
    structure: Mapping[str, HostArray]


class Arena:
    """Static buffers, allocated at their limits before any capture and never grown.

    Invariant: at a given capacity every buffer is one contiguous view at one address, for the arena's whole life. Rows,
    bridges and outputs start at the base of their own storage at every capacity. Metadata is packed into one slab, so
    that all of a batch's metadata goes to the device in a single copy.
    """

    def __init__(self, buffers: Sequence[Buffer], limits: Mapping[str, int], device: torch.device | str) -> None:
        self.buffers = {buffer.name: buffer for buffer in buffers}
        self.limits = Capacity.of(limits)
        self.device = torch.device(device)
        _check_declaration(buffers, self.limits)
        self._storages = {
            b.name: torch.zeros(b.numel(self.limits), dtype=b.dtype, device=self.device)
            for b in buffers
            if b.role is not Role.METADATA
        }
        self._inputs = {b.name: b for b in buffers if b.role in (Role.INPUT, Role.METADATA)}
        self._rows = [b for b in buffers if b.role is Role.INPUT]
        self._metadata = [b for b in buffers if b.role is Role.METADATA]
        self._dtypes = {b.name: numpy_dtype(b) for b in self._metadata}
        self.boundaries = tuple(
            Boundary(b.name, b.padding.rows, b.dimension[0], b.padding.longest or 0)
            for b in self._metadata
            if isinstance(b.padding, DummySegment) and b.dimension is not None
        )
        self._layouts = lru_cache(MAX_LAYOUTS)(partial(SlabLayout, list(buffers)))
        self._sizes = lru_cache(MAX_SIZES)(self._agreed_sizes)
        self._misfits = lru_cache(MAX_SIZES)(partial(misfit, boundaries=self.boundaries))
        self.rows = lru_cache(MAX_SIZES)(self._first_rows)
        slab_bytes = self._layouts(self.limits).nbytes
        self._slab = torch.zeros(slab_bytes, dtype=torch.uint8, device=self.device)
        self._staging = Staging(slab_bytes, self.device)

    @property
    def nbytes(self) -> int:
        return self._slab.nbytes + sum(storage.nbytes for storage in self._storages.values())

    def addresses(self) -> dict[str, int]:
        """The start of every storage. Together with a capacity these fix the address of every view."""
        return dict(zip(("metadata", *self._storages), self.pointers(), strict=True))

    def pointers(self) -> list[int]:
        """`addresses` without names, compared at every replay. Never cached, so that a replaced storage is noticed."""
        return [self._slab.data_ptr(), *map(Tensor.data_ptr, self._storages.values())]

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of this arena."""
        return tensor.untyped_storage().data_ptr() in self.pointers()

    def storages(self) -> dict[str, Tensor]:
        """Every storage at full length, under the names of `addresses`."""
        return {"metadata": self._slab, **self._storages}

    def num_views(self, names: Sequence[str]) -> int:
        """How many references these buffers' storages have: from views, whoever holds them, and from arrays on top."""
        return sum(torch._C._storage_Use_Count(self._storages[name].untyped_storage()._cdata) for name in names)

    def views(self, capacity: Mapping[str, int]) -> dict[str, Tensor]:
        layout = self._layouts(Capacity.of(capacity))
        views = {name: layout.front(name, storage) for name, storage in self._storages.items()}
        for place in layout.places:
            raw = self._slab[place.start : place.stop]
            views[place.buffer.name] = raw.view(place.buffer.dtype).view(place.shape)
        return views

    def _first_rows(self, name: str, count: int) -> Tensor:
        """The first rows of an input, to write in place. If they are passed to `admit`, `fill` does not copy them."""
        buffer = self.buffers[name]
        if buffer.axis != 0 or buffer.dimension is None:
            raise GraphError(f"buffer {name!r} of shape {buffer.shape} has no rows to write in place")
        return self._storages[name].view(-1, *map(int, buffer.shape[1:])).narrow(0, 0, count)

    def admit(self, values: Mapping[str, Any]) -> Batch:
        """Check a batch on the host before anything is launched."""
        if values.keys() != self._inputs.keys():
            self._refuse_names(values)
        tensors = {b.name: self._as_tensor(b, values[b.name]) for b in self._rows}
        arrays = {name: _as_array(name, values[name], dtype) for name, dtype in self._dtypes.items()}
        shapes = (*[tensor.shape for tensor in tensors.values()], *[array.shape for array in arrays.values()])
        sizes = self._sizes(shapes)
        structure = {b.name: _checked_boundaries(b, arrays[b.name], sizes[b.rows]) for b in self.boundaries}
        return Batch(tensors, arrays, sizes, structure)

    def empty_batch(self) -> Batch:
        """A batch without rows or segments: all padding at any capacity."""
        none = dict.fromkeys(self.limits, 0)
        views = self.views(none)
        arrays = {b.name: np.zeros(b.sized(none), dtype=self._dtypes[b.name]) for b in self._metadata}
        structure = {b.name: arrays[b.name] for b in self.boundaries}
        rows = {b.name: views[b.name] for b in self._rows}
        return Batch(rows, arrays, Capacity.of(none), structure)

    def misfit(self, sizes: Mapping[str, int], capacity: Mapping[str, int]) -> str | None:
        """Why a batch of these sizes does not fit a capacity; None if it does."""
        return self._misfits(Capacity.of(sizes), Capacity.of(capacity))

    def fill(self, batch: Batch, capacity: Mapping[str, int]) -> None:
        """Write a batch and its padding. Allocates nothing on the device; waits only for the copy three fills ago."""
        room = Capacity.of(capacity)
        if problem := self._misfits(batch.sizes, room):
            raise GraphError(f"batch of {batch.sizes} does not fit {room}: {problem}")
        layout = self._layouts(room)
        for name, value in batch.tensors.items():
            _fill_rows(self.buffers[name], value, layout.front(name, self._storages[name]))
        if layout.places:
            layout.send(batch.arrays, self._staging, self._slab)

    def poison(self, capacity: Mapping[str, int], sizes: Mapping[str, int] | None = None) -> None:
        """Write NaN to the padded rows of floating-point inputs or, without `sizes`, to every floating-point buffer."""
        for name, view in self.views(capacity).items():
            buffer = self.buffers[name]
            if not view.is_floating_point() or (sizes is not None and buffer.role is not Role.INPUT):
                continue
            if sizes is None:
                view.fill_(float("nan"))
            elif buffer.dimension is not None and buffer.axis is not None:
                valid = sizes[buffer.dimension[0]] + buffer.dimension[1]
                view.narrow(buffer.axis, valid, view.shape[buffer.axis] - valid).fill_(float("nan"))

    def _as_tensor(self, buffer: Buffer, value: Any) -> Tensor:
        name = buffer.name
        if not isinstance(value, Tensor):
            raise GraphError(f"input {name!r} is a {type(value).__name__}; pass a tensor")
        if value.dtype != buffer.dtype:
            raise GraphError(f"input {name!r} is {value.dtype}; the buffer is {buffer.dtype}")
        if value.device.type != self.device.type and not value.is_pinned():
            raise GraphError(f"input {name!r} is on {value.device}; the buffer is on {self.device} (or pin it)")
        is_front = not buffer.axis and value.data_ptr() == self._storages[name].data_ptr() and value.is_contiguous()
        if value.numel() and not is_front and self.owns(value):
            raise GraphError(
                f"input {name!r} of strides {tuple(value.stride())} is a view of the arena, but not the first rows of "
                f"its own buffer, so filling would overwrite it: pass arena.rows({name!r}, count), or a copy"
            )
        return value

    def _refuse_names(self, values: Mapping[str, Any]) -> None:
        takes = f"the arena takes {', '.join(self._inputs)}"
        if missing := self._inputs.keys() - values.keys():
            raise GraphError(f"missing input {sorted(missing)[0]!r}; {takes}")
        raise GraphError(f"unexpected input {sorted(values.keys() - self._inputs.keys())[0]!r}; {takes}")

    def _agreed_sizes(self, shapes: tuple[tuple[int, ...], ...]) -> Capacity:
        """The size of every dimension. All inputs must agree on it; `shapes` are those of rows, then of metadata."""
        sizes: dict[str, int] = {}
        by_name = dict(zip((b.name for b in (*self._rows, *self._metadata)), shapes, strict=True))
        for name, buffer in self._inputs.items():
            shape = by_name[name]
            expected, axis = buffer.shape, buffer.axis
            if axis is not None and buffer.dimension is not None and len(shape) == len(expected):
                dimension, extra = buffer.dimension
                size = shape[axis] - extra
                if sizes.setdefault(dimension, size) != size:
                    raise self._disagreement(dimension, sizes[dimension], name, size)
                expected = (*expected[:axis], shape[axis], *expected[axis + 1 :])
            if shape != expected:
                raise GraphError(f"input {name!r} has shape {tuple(shape)}; the buffer is {buffer.shape}")
        return Capacity(tuple([(name, sizes.get(name, 0)) for name, _ in self.limits.sizes]))

    def _disagreement(self, dimension: str, size: int, name: str, other: int) -> GraphError:
        first = next(n for n, b in self._inputs.items() if b.dimension is not None and b.dimension[0] == dimension)
        return GraphError(f"inputs disagree on {dimension!r}: {first!r} has {size}, {name!r} has {other}")


def _fill_rows(buffer: Buffer, value: Tensor, view: Tensor) -> None:
    axis = buffer.axis
    if axis is None:
        view.copy_(value, non_blocking=True)
        return
    count, num_padded = value.shape[axis], view.shape[axis] - value.shape[axis]
    if value.data_ptr() != view.data_ptr():
        view.narrow(axis, 0, count).copy_(value, non_blocking=True)
    if num_padded:
        assert isinstance(buffer.padding, Fill), "only metadata may be padded in another way"
        view.narrow(axis, count, num_padded).fill_(buffer.padding.value)


def _check_declaration(buffers: Sequence[Buffer], limits: Capacity) -> None:
    names = [buffer.name for buffer in buffers]
    if len(set(names)) < len(names):
        raise ConfigError(f"buffers declared twice: {sorted({n for n in names if names.count(n) > 1})}")
    for buffer in buffers:
        dimensions = [buffer.dimension[0]] if buffer.dimension else []
        if isinstance(buffer.padding, DummySegment):
            dimensions.append(buffer.padding.rows)
        for dimension in dimensions:
            if dimension not in limits:
                raise ConfigError(f"buffer {buffer.name!r} varies in {dimension!r}; limits are set for {limits}")


def _as_array(name: str, value: Any, dtype: np.dtype[Any]) -> HostArray:
    if isinstance(value, np.ndarray) and value.dtype == dtype:
        return value
    if isinstance(value, Tensor) and value.device.type != "cpu":
        raise GraphError(f"metadata {name!r} is on {value.device}; pass the host's copy, so that nothing waits")
    array = np.asarray(value)
    if array.dtype != dtype and array.size and dtype.kind in "iu":
        if not np.can_cast(array.dtype, np.int64):
            raise GraphError(f"metadata {name!r} is {array.dtype}; the buffer holds integers")
        room, low, high = np.iinfo(dtype), array.min(), array.max()
        if low < room.min or high > room.max:  # it would silently wrap
            worst = low if low < room.min else high
            raise GraphError(f"metadata {name!r} has {worst}; its buffer is {dtype} and holds {room.min} to {room.max}")
    return array


def _checked_boundaries(boundary: Boundary, values: HostArray, num_rows: int) -> HostArray:
    name, limit = boundary.name, boundary.longest
    if values.size == 0 or values[0] != 0:
        raise GraphError(f"boundaries {name!r} start with {values[:1].tolist()}; they must start with 0")
    starts, ends = values[:-1], values[1:]
    is_fall = ends < starts
    if is_fall.any():
        at = int(is_fall.argmax())
        low, high = values[at : at + 2].tolist()
        raise GraphError(f"boundaries {name!r} fall from {low} to {high} at {at + 1}; they must not decrease")
    if values[-1] != num_rows:
        raise GraphError(f"boundaries {name!r} end at {values[-1]}; the batch has {num_rows} {boundary.rows}")
    if limit and (longest := (ends - starts).max(initial=0)) > limit:
        raise GraphError(f"boundaries {name!r} have a segment of {longest} {boundary.rows}; the limit is {limit}")
    return values

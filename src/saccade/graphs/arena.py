"""The arena: static buffers allocated once, and the only code that writes a batch into them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.errors import ConfigError, GraphError
from saccade.graphs.buffers import Buffer, DummySegment, Fill, OwnIndex, RepeatLast, Role
from saccade.graphs.key import Capacity

Array = np.ndarray[Any, np.dtype[Any]]

ALIGNMENT_BYTES = 256
MAX_LAYOUTS = 1024  # eager runs may bring any size: layouts are remembered, but not without end
NUM_STAGING_SLABS = 3  # a slab is written again only when its copy is done; three let the host run two batches ahead


@dataclass(frozen=True, slots=True)
class Batch:
    """One admitted batch: valid rows only, sizes agreed, boundaries checked on the host."""

    tensors: Mapping[str, Tensor]
    arrays: Mapping[str, Array]
    sizes: Capacity
    structure: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class _Place:
    """Bytes `start` to `stop` of the metadata slab hold a buffer of this shape."""

    buffer: Buffer
    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Arena:
    """Static buffers of one lane, allocated at their largest before any capture and never grown.

    Invariant: at a given capacity every buffer is one contiguous view at one address, for the arena's whole life.
    Rows, bridges and outputs start at the base of their own storage at every capacity. Metadata is packed one after
    the other into one slab, so that all of a batch's metadata goes to the device in a single copy.
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
        self._metadata = [b for b in buffers if b.role is Role.METADATA]
        self._layouts: dict[Capacity, tuple[list[_Place], int]] = {}
        slab_bytes = self._packed(self.limits)[1]
        self._slab = torch.zeros(slab_bytes, dtype=torch.uint8, device=self.device)
        self._staging = _Staging(slab_bytes, self.device)

    @property
    def nbytes(self) -> int:
        return self._slab.nbytes + sum(storage.nbytes for storage in self._storages.values())

    def addresses(self) -> dict[str, int]:
        """Where every storage starts; with the capacity this fixes the address of every view."""
        return {"metadata": self._slab.data_ptr()} | {n: s.data_ptr() for n, s in self._storages.items()}

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of this arena."""
        storage = tensor.untyped_storage().data_ptr()
        own = (self._slab, *self._storages.values())
        return any(storage == mine.untyped_storage().data_ptr() for mine in own)

    def views(self, capacity: Mapping[str, int]) -> dict[str, Tensor]:
        """Every buffer at a capacity."""
        views = {
            name: storage[: self.buffers[name].numel(capacity)].view(self.buffers[name].sized(capacity))
            for name, storage in self._storages.items()
        }
        for place in self._packed(capacity)[0]:
            raw = self._slab[place.start : place.stop]
            views[place.buffer.name] = raw.view(place.buffer.dtype).view(place.shape)
        return views

    def rows(self, name: str, count: int) -> Tensor:
        """The first rows of an input, to be written in place; passing them to `admit` then copies nothing."""
        buffer = self.buffers[name]
        if buffer.axis != 0 or buffer.dimension is None:
            raise GraphError(f"buffer {name!r} of shape {buffer.shape} has no rows to write in place")
        shape = buffer.sized({buffer.dimension[0]: count})
        return self._storages[name][: buffer.numel({buffer.dimension[0]: count})].view(shape)

    def admit(self, values: Mapping[str, Any]) -> Batch:
        """Check a batch on the host before anything is launched."""
        inputs = {n: b for n, b in self.buffers.items() if b.role in (Role.INPUT, Role.METADATA)}
        if missing := inputs.keys() - values.keys():
            raise GraphError(f"missing input {sorted(missing)[0]!r}; the arena takes {', '.join(inputs)}")
        if unexpected := values.keys() - inputs.keys():
            raise GraphError(f"unexpected input {sorted(unexpected)[0]!r}; the arena takes {', '.join(inputs)}")
        tensors = {n: _as_tensor(b, values[n], self.device) for n, b in inputs.items() if b.role is Role.INPUT}
        arrays = {b.name: _as_array(b, values[b.name]) for b in self._metadata}
        sizes = _agreed_sizes(inputs, {**tensors, **arrays}, self.limits)
        structure = {
            b.name: _checked_boundaries(b.name, arrays[b.name], sizes[b.padding.rows], b.padding)
            for b in self._metadata
            if isinstance(b.padding, DummySegment)
        }
        return Batch(tensors, arrays, sizes, structure)

    def empty_batch(self) -> Batch:
        """A batch of no rows and no segments: at any capacity it is all padding."""
        none = dict.fromkeys(self.limits, 0)
        views = self.views(none)
        arrays = {b.name: np.zeros(b.sized(none), dtype=_numpy_dtype(b)) for b in self._metadata}
        structure = {b.name: arrays[b.name] for b in self._metadata if isinstance(b.padding, DummySegment)}
        rows = {name: views[name] for name, buffer in self.buffers.items() if buffer.role is Role.INPUT}
        return Batch(rows, arrays, Capacity.of(none), structure)

    def misfit(self, sizes: Mapping[str, int], capacity: Mapping[str, int]) -> str | None:
        """Why a batch of these sizes does not fit a capacity; None if it does."""
        needed = dict(sizes)
        for buffer in self._metadata:
            if isinstance(buffer.padding, DummySegment) and buffer.dimension is not None:
                padded_rows = capacity[buffer.padding.rows] - sizes[buffer.padding.rows]
                needed[buffer.dimension[0]] += buffer.padding.segments_for(max(padded_rows, 0))
        for name, size in needed.items():
            if size > capacity[name]:
                return f"{name}: {size} > {capacity[name]}"
        return None

    def fill(self, batch: Batch, capacity: Mapping[str, int]) -> None:
        """Write a batch and its padding. No allocation on the device; waits only for a copy of three batches ago."""
        if problem := self.misfit(batch.sizes, capacity):
            raise GraphError(f"batch of {batch.sizes} does not fit {Capacity.of(capacity)}: {problem}")
        for name, value in batch.tensors.items():
            self._fill_rows(self.buffers[name], value, capacity)
        if not self._metadata:
            return
        places, nbytes = self._packed(capacity)
        staged = self._staging.next_slab()
        for place in places:
            view = staged[place.start : place.stop].view(place.dtype).reshape(place.shape)
            _write_padded(place.buffer, view, batch.arrays[place.buffer.name], capacity)
        self._staging.send(self._slab, nbytes)

    def poison(self, capacity: Mapping[str, int], sizes: Mapping[str, int] | None = None) -> None:
        """Overwrite with NaN: the padded rows of a filled batch, or (no sizes) every floating buffer whole."""
        for name, view in self.views(capacity).items():
            buffer = self.buffers[name]
            if not view.is_floating_point() or (sizes is not None and buffer.role is not Role.INPUT):
                continue
            if sizes is None:
                view.fill_(float("nan"))
            elif buffer.dimension is not None and buffer.axis is not None:
                valid = sizes[buffer.dimension[0]] + buffer.dimension[1]
                view.narrow(buffer.axis, valid, view.shape[buffer.axis] - valid).fill_(float("nan"))

    def _packed(self, capacity: Mapping[str, int]) -> tuple[list[_Place], int]:
        """Where the metadata lies at a capacity, and how many bytes it takes."""
        key = Capacity.of(capacity)
        if key in self._layouts:
            return self._layouts[key]
        places, end = [], 0
        for buffer in self._metadata:
            stop = end + buffer.nbytes(capacity)
            places.append(_Place(buffer, end, stop, buffer.sized(capacity), _numpy_dtype(buffer)))
            end = -(-stop // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if len(self._layouts) >= MAX_LAYOUTS:
            self._layouts.clear()
        self._layouts[key] = places, end
        return places, end

    def _fill_rows(self, buffer: Buffer, value: Tensor, capacity: Mapping[str, int]) -> None:
        view = self._storages[buffer.name][: buffer.numel(capacity)].view(buffer.sized(capacity))
        axis = buffer.axis
        if axis is None:
            view.copy_(value, non_blocking=True)
            return
        count = value.shape[axis]
        if value.data_ptr() != view.data_ptr():
            view.narrow(axis, 0, count).copy_(value, non_blocking=True)
        padded = view.narrow(axis, count, view.shape[axis] - count)
        if padded.numel() == 0:
            return
        if isinstance(buffer.padding, RepeatLast) and count:
            padded.copy_(view.narrow(axis, count - 1, 1).expand_as(padded))
        else:
            padded.fill_(buffer.padding.value if isinstance(buffer.padding, Fill) else 0)


class _Staging:
    """A ring of host slabs. On CUDA they are pinned, and a slab is reused only after its copy is done."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        slabs = [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(NUM_STAGING_SLABS)]
        self._slabs = slabs
        self._arrays: list[Array] = [slab.numpy() for slab in slabs]
        self._events = [torch.cuda.Event() for _ in slabs] if pinned else None
        self._turn = 0

    def next_slab(self) -> Array:
        self._turn = (self._turn + 1) % NUM_STAGING_SLABS
        if self._events is not None:
            self._events[self._turn].synchronize()
        return self._arrays[self._turn]

    def send(self, target: Tensor, nbytes: int) -> None:
        target[:nbytes].copy_(self._slabs[self._turn][:nbytes], non_blocking=True)
        if self._events is not None:
            self._events[self._turn].record()


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
        if buffer.role is Role.METADATA:
            _numpy_dtype(buffer)


def _numpy_dtype(buffer: Buffer) -> np.dtype[Any]:
    try:
        return np.dtype(str(buffer.dtype).removeprefix("torch."))
    except TypeError:
        raise ConfigError(f"metadata {buffer.name!r} is {buffer.dtype}, which the host has no array for") from None


def _as_tensor(buffer: Buffer, value: Any, device: torch.device) -> Tensor:
    if not isinstance(value, Tensor):
        raise GraphError(f"input {buffer.name!r} is a {type(value).__name__}; give a tensor")
    if value.dtype != buffer.dtype:
        raise GraphError(f"input {buffer.name!r} is {value.dtype}; the buffer is {buffer.dtype}")
    if value.device.type != device.type and not value.is_pinned():
        raise GraphError(f"input {buffer.name!r} is on {value.device}; the buffer is on {device} (or pin it)")
    return value


def _as_array(buffer: Buffer, value: Any) -> Array:
    if isinstance(value, Tensor):
        if value.device.type != "cpu":
            raise GraphError(f"metadata {buffer.name!r} is on {value.device}; give the host's copy (no GPU wait)")
        value = value.numpy()
    array = np.asarray(value)
    if array.size and not np.can_cast(array.dtype, np.int64) and np.dtype(_numpy_dtype(buffer)).kind in "iu":
        raise GraphError(f"metadata {buffer.name!r} is {array.dtype}; the buffer holds integers")
    return array


def _agreed_sizes(inputs: Mapping[str, Buffer], values: Mapping[str, Any], limits: Capacity) -> Capacity:
    """The size of every dimension, on which all inputs must agree."""
    sizes: dict[str, tuple[int, str]] = {}
    for name, buffer in inputs.items():
        shape = tuple(values[name].shape)
        expected = list(buffer.shape)
        if buffer.axis is not None and buffer.dimension is not None and len(shape) == len(expected):
            dimension, extra = buffer.dimension
            size, seen_in = sizes.setdefault(dimension, (shape[buffer.axis] - extra, name))
            if shape[buffer.axis] - extra != size:
                other = shape[buffer.axis] - extra
                raise GraphError(f"inputs disagree on {dimension!r}: {seen_in!r} has {size}, {name!r} has {other}")
            expected[buffer.axis] = shape[buffer.axis]
        if list(shape) != expected:
            raise GraphError(f"input {name!r} has shape {shape}; the buffer is {buffer.shape}")
    unseen = {name: 0 for name in limits if name not in sizes}
    return Capacity.of({name: size for name, (size, _) in sizes.items()} | unseen)


def _checked_boundaries(name: str, values: Array, num_rows: int, padding: DummySegment) -> Array:
    if values.size == 0 or values[0] != 0:
        raise GraphError(f"boundaries {name!r} start with {values[:1].tolist()}; they must start with 0")
    lengths = np.diff(values)
    if (falls := np.flatnonzero(lengths < 0)).size:
        low, high = values[falls[0] : falls[0] + 2].tolist()
        raise GraphError(f"boundaries {name!r} fall from {low} to {high} at {falls[0] + 1}; they must not decrease")
    if values[-1] != num_rows:
        raise GraphError(f"boundaries {name!r} end at {values[-1]}; the batch has {num_rows} {padding.rows}")
    if padding.longest and lengths.max(initial=0) > padding.longest:
        raise GraphError(f"boundaries {name!r} have a segment of {lengths.max()}; the longest may be {padding.longest}")
    return values


def _write_padded(buffer: Buffer, view: Array, value: Array, capacity: Mapping[str, int]) -> None:
    if buffer.axis is None:
        view[...] = value
        return
    if buffer.axis:
        view, value = view.swapaxes(buffer.axis, 0), value.swapaxes(buffer.axis, 0)
    count = value.shape[0]
    view[:count] = value
    match buffer.padding:
        case DummySegment(rows, longest):
            ends = np.arange(1, view.shape[0] - count + 1) * (longest or capacity[rows]) + value[-1]
            view[count:] = np.minimum(ends, capacity[rows])
        case OwnIndex():
            view[count:] = np.arange(count, view.shape[0])
        case RepeatLast() if count:
            view[count:] = view[count - 1]
        case Fill(fill_value):
            view[count:] = fill_value
        case _:
            view[count:] = 0

"""How metadata gets to the device: where each buffer lies in the slab, and the host slabs it is copied from."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.errors import ConfigError
from saccade.graphs.buffers import Buffer, DummySegment, OwnIndex, Role

HostArray = np.ndarray[Any, np.dtype[Any]]

ALIGNMENT_BYTES = 256
NUM_STAGING_SLABS = 3  # a slab is rewritten only after its copy; three let the host run two batches ahead


class SlabPlace:
    """Bytes `start` to `stop` of the metadata slab hold one buffer."""

    __slots__ = ("_num_rows", "buffer", "dtype", "shape", "start", "stop")

    def __init__(self, buffer: Buffer, start: int, capacity: Mapping[str, int]) -> None:
        self.buffer = buffer
        self.start, self.stop = start, start + buffer.nbytes(capacity)
        self.shape = buffer.sized(capacity)
        self.dtype = numpy_dtype(buffer)
        padding = buffer.padding
        self._num_rows = capacity[padding.rows] if isinstance(padding, DummySegment) else 0

    def view(self, slab: HostArray) -> HostArray:
        """The buffer in a host slab, with the varying axis first."""
        view = slab[self.start : self.stop].view(self.dtype).reshape(self.shape)
        return view.swapaxes(self.buffer.axis, 0) if self.buffer.axis else view

    def write(self, view: HostArray, value: HostArray) -> None:
        """Write a value and its padding into a view made by `view`."""
        axis = self.buffer.axis
        if axis is None:
            view[...] = value
            return
        count, padding = value.shape[axis], self.buffer.padding
        view[:count] = value.swapaxes(axis, 0) if axis else value
        if count == len(view):
            return
        if isinstance(padding, DummySegment):
            view[count:] = self._num_rows
            if padding.longest:
                ends = np.arange(1, len(view) - count + 1) * padding.longest + view[count - 1]
                np.minimum(ends, self._num_rows, out=view[count:])
        elif isinstance(padding, OwnIndex):
            view[count:] = np.arange(count, len(view))
        else:
            view[count:] = padding.value


class SlabLayout:
    """Where a batch lies in the arena at one capacity. Cached, because buckets recur."""

    def __init__(self, buffers: Sequence[Buffer], capacity: Mapping[str, int]) -> None:
        self.places: list[SlabPlace] = []
        self.nbytes = 0
        for buffer in buffers:
            if buffer.role is Role.METADATA:
                place = SlabPlace(buffer, self.nbytes, capacity)
                self.places.append(place)
                self.nbytes = -(-place.stop // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.shapes = {b.name: b.sized(capacity) for b in buffers if b.role is not Role.METADATA}
        self._fronts: dict[str, Tensor] = {}
        self._views: list[list[HostArray] | None] = [None] * NUM_STAGING_SLABS

    def front(self, name: str, storage: Tensor) -> Tensor:
        """The part of a storage that a buffer uses at this capacity. Cached until the storage's address changes."""
        front = self._fronts.get(name)
        if front is None or front.data_ptr() != storage.data_ptr():
            shape = self.shapes[name]
            front = self._fronts[name] = storage[: prod(shape)].view(shape)
        return front

    def send(self, arrays: Mapping[str, HostArray], staging: "Staging", slab: Tensor) -> None:
        """Write all metadata, padding included, to the next host slab, and queue its copy."""
        turn, staged = staging.next_slab()
        views = self._views[turn]
        if views is None:
            views = self._views[turn] = [place.view(staged) for place in self.places]
        for place, view in zip(self.places, views, strict=True):
            place.write(view, arrays[place.buffer.name])
        staging.send(slab, self.nbytes)


class Staging:
    """A ring of host slabs, pinned on CUDA. The host owns a slab from `next_slab` to `send`. After that the copy owns
    it: `next_slab` waits for the slab's last copy, and nothing else here waits."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        slabs = [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(NUM_STAGING_SLABS)]
        self._slabs = slabs
        self._arrays: list[HostArray] = [slab.numpy() for slab in slabs]
        self._events = [torch.cuda.Event() for _ in slabs] if pinned else None
        self._turn = 0

    def next_slab(self) -> tuple[int, HostArray]:
        """The next slab and its number."""
        self._turn = (self._turn + 1) % NUM_STAGING_SLABS
        if self._events is not None:
            self._events[self._turn].synchronize()
        return self._turn, self._arrays[self._turn]

    def send(self, target: Tensor, nbytes: int) -> None:
        target[:nbytes].copy_(self._slabs[self._turn][:nbytes], non_blocking=True)
        if self._events is not None:
            self._events[self._turn].record()


def numpy_dtype(buffer: Buffer) -> np.dtype[Any]:
    try:
        return np.dtype(str(buffer.dtype).removeprefix("torch."))
    except TypeError:
        raise ConfigError(f"metadata {buffer.name!r} is {buffer.dtype}, which NumPy does not support") from None

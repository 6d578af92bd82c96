"""Views, copies and restores what a pass read, wrote and produced.

Besides its inputs, a pass reads two kinds of data. Newest tokens, logits and rows of the prefill's output are
overwritten by the next step; phases name them in `volatile_in`. Keys, values and image rows stay until their place is
reused, which `Writers` tracks.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from saccade.execution.state import DeviceState
from saccade.graphs import GraphKey, GraphRunner, Phase
from saccade.graphs.compare import Tensors
from saccade.graphs.phase import Outputs
from saccade.graphs.runner import Result
from saccade.scheduling.arrays import AnyInts, places

PassArrays = Mapping[str, AnyInts]

ALIGNMENT_BYTES = 256


class Writers:
    """The number of the last pass that wrote each slot of the KV cache and each row of the encoder cache."""

    def __init__(self, state: DeviceState) -> None:
        self._block_size = state.block_size
        self._number = 0
        self._slots = np.zeros(state.num_blocks * state.block_size, dtype=np.int64)
        self._rows = np.zeros(0 if state.vision_rows is None else state.vision_rows.shape[1], dtype=np.int64)

    def note(self, arrays: PassArrays) -> int:
        """Records a pass that is about to run, and returns its number."""
        self._number += 1
        if "slots" in arrays:
            self._slots[arrays["slots"]] = self._number
        if "targets" in arrays:
            self._rows[arrays["targets"]] = self._number
        return self._number

    def is_intact(self, arrays: PassArrays, number: int) -> bool:
        """Whether everything that pass `number` read from caches is still unchanged."""
        if "block_tables" in arrays and self._last_writer(arrays) > number:
            return False
        return "sources" not in arrays or not (self._rows[source_rows(arrays)] > number).any()

    def _last_writer(self, arrays: PassArrays) -> int:
        """The last pass that wrote a key this one read. The last block is compared by slot, because its request may
        have appended to it since; earlier blocks are compared whole, because there may be millions of slots."""
        tables, size = arrays["block_tables"], self._block_size
        num_full, rest = np.divmod(arrays["key_lengths"].astype(np.int64), size)
        by_block = self._slots.reshape(-1, size).max(axis=1)
        full = tables[np.arange(tables.shape[1]) < num_full[:, None]]
        is_partial = rest > 0
        last = tables[is_partial, num_full[is_partial]].astype(np.int64)
        places = (last * size)[:, None] + np.arange(size)
        partial = places[np.arange(size) < rest[is_partial][:, None]]
        return int(max(by_block[full].max(initial=0), self._slots[partial].max(initial=0)))

    def own_rows(self, arrays: PassArrays, number: int) -> AnyInts:
        """Which of the rows that pass `number` wrote, counted over the shares of all ranks, it was the last to write.
        Shorter shares are filled up with target 0, where padding goes."""
        targets = arrays["targets"].reshape(-1)
        return np.flatnonzero((self._rows[targets] == number) & (targets > 0))


def context_slots(arrays: PassArrays, block_size: int) -> AnyInts:
    """Slots of the keys and values that a pass reads, including those it wrote."""
    pairs = zip(arrays["block_tables"], arrays["key_lengths"].tolist(), strict=True)
    found = [places(0, length, table.tolist(), block_size) for table, length in pairs]
    return np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *found]))


def source_rows(arrays: PassArrays) -> AnyInts:
    return np.unique(arrays["sources"][arrays["sources"] >= 0])


def every_nth(view: Tensor, axis: int, most_bytes: int) -> Tensor:
    """Evenly spaced rows of a tensor, of at most `most_bytes` in total."""
    step = max(1, -(-view.nbytes // most_bytes))
    return view[(slice(None),) * axis + (slice(None, None, step),)]


def results_of(phase: Phase, arrays: PassArrays, outputs: Tensors, most_bytes: int) -> dict[str, Tensor]:
    """Views of a pass's outputs and of what it wrote outside its arena; of large tensors only every n-th row."""
    found = {name: every_nth(view, phase.arena.buffers[name].axis or 0, most_bytes) for name, view in outputs.items()}
    return found | {name: every_nth(view, 0, most_bytes) for name, view in phase.volatile_out(arrays).items()}


def put_back(phase: Phase, arrays: PassArrays, reads: Tensors) -> None:
    """Restores what a pass read and later passes overwrote."""
    for name, view in phase.volatile_in(arrays).items():
        view.copy_(reads[name], non_blocking=True)


def written_keys(state: DeviceState, arrays: PassArrays, most_bytes: int) -> dict[str, Tensor]:
    """Keys and values that a pass wrote, as cached now; if there are many, only those of every n-th slot."""
    if "slots" not in arrays:
        return {}
    row_bytes = sum(part[0, 0].nbytes for pair in state.caches for part in pair)
    step = max(1, -(-len(arrays["slots"]) * row_bytes // most_bytes))
    return cached_keys(state, arrays["slots"][::step])


def written_rows(state: DeviceState, arrays: PassArrays, own: AnyInts) -> dict[str, Tensor]:
    assert state.vision_rows is not None, "a vision pass wrote there"
    targets = torch.from_numpy(np.asarray(arrays["targets"], dtype=np.int64).reshape(-1)[own])
    return {"rows of the cache": state.vision_rows.index_select(1, targets.to(state.vision_rows.device))}


def vision_rows_in(outputs: Tensors, own: AnyInts) -> Tensor:
    """Those rows in the outputs of a vision pass, which may have a dimension for the ranks' shares."""
    rows_LUD = outputs["rows"].flatten(1, -2)
    return rows_LUD.index_select(1, torch.from_numpy(own).to(rows_LUD.device))


def cached_keys(state: DeviceState, slots: AnyInts) -> dict[str, Tensor]:
    index = torch.from_numpy(np.asarray(slots, dtype=np.int64)).to(state.newest_ids.device)
    found = {}
    for layer, (keys, values) in enumerate(state.caches):
        found[f"keys of layer {layer}"] = keys.flatten(0, 1).index_select(0, index)
        found[f"values of layer {layer}"] = values.flatten(0, 1).index_select(0, index)
    return found


def run_eagerly(
    runner: GraphRunner, values: Mapping[str, Any], consume: Callable[[Outputs], Result], *, like: GraphKey
) -> Result:
    """Runs a batch eagerly, at the shape of graph `like`. Image rows go to the padding row, because the rows that the
    graph wrote may belong to other images by now."""
    if "targets" in values:
        values = {**values, "targets": np.zeros_like(values["targets"])}
    return runner.eager(values, consume, at=None if like.digest else like.capacity)


class TooLargeError(Exception):
    """A slab is too small for one owner's copies."""


class Owner(Protocol):
    """The owner of copies in a slab; `is_lost` once newer copies overwrite them."""

    is_lost: bool


class Slab:
    """A ring buffer on the device, where new copies evict the oldest. All copies into a slab must be queued on one
    stream, so that an older copy never overwrites a newer one."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._bytes = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._regions: deque[tuple[int, int, Owner]] = deque()  # oldest first
        self._cursor = 0

    @property
    def nbytes(self) -> int:
        return self._bytes.nbytes

    @property
    def most_bytes(self) -> int:
        """The most bytes kept of one result; of a larger one, every n-th row is kept."""
        return self.nbytes // 4

    def copy(self, owner: Owner, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        sizes = {name: -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for name, tensor in tensors.items()}
        start = self._reserve(owner, sum(sizes.values()))
        copies = {}
        for name, tensor in tensors.items():
            room = self._bytes[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies[name] = room.copy_(tensor, non_blocking=True)
            start += sizes[name]
        return copies

    def _reserve(self, owner: Owner, nbytes: int) -> int:
        if nbytes > self.nbytes:
            raise TooLargeError
        start = self._cursor if self._cursor + nbytes <= self.nbytes else 0
        stop = start + nbytes
        while any(begin < stop and start < end for begin, end, _ in self._regions):
            self._regions.popleft()[2].is_lost = True
        self._regions.append((start, stop, owner))
        self._cursor = stop
        if owner.is_lost:
            raise TooLargeError
        return start

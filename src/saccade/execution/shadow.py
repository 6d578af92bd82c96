"""Shadow checks: a share of live replays is rerun eagerly and compared bit for bit.

What a replay read and produced is copied on the replay's stream into preallocated memory, without waiting. The eager
run happens when the engine is idle, and stops between two operations when a command arrives. It changes nothing that a
request could see, because it writes the bits that the caches already hold. If the bits differ, the graph was wrong:
the graph is retired, the caches are emptied, and the inputs are saved to a file.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from saccade.execution.executor import DeviceExecutor
from saccade.execution.shadow_file import Origin, ShadowFile, context_of, current_versions, digest_of, write_file
from saccade.execution.shadow_passes import (
    PassArrays,
    Slab,
    TooLargeError,
    Writers,
    put_back,
    results_of,
    run_eagerly,
    written_keys,
    written_rows,
)
from saccade.graphs import Batch, GraphKey, GraphRunner
from saccade.graphs.compare import OutputDifference, Tensors, bit_differences
from saccade.graphs.operation_mode import OperationMode

ShouldStop = Callable[[], bool]
Found = tuple[list[OutputDifference], dict[str, Tensor]]

MAX_RECORDS = 256
MAX_DUE = 2  # records drawn by chance but not yet assigned to a replay


@dataclass(eq=False, slots=True, kw_only=True)
class ReplayRecord:
    """One replay. Its tensors are in a slab; once `is_lost`, newer records have overwritten them."""

    runner: GraphRunner
    key: GraphKey
    number: int
    arrays: PassArrays
    inputs: dict[str, Tensor] = field(default_factory=dict)
    reads: dict[str, Tensor] = field(default_factory=dict)
    results: dict[str, Tensor] = field(default_factory=dict)
    cached: dict[str, Tensor] | None = None  # a copy of what it wrote to caches, where a check writes too
    is_begun: bool = False  # a check of it has begun
    is_lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A replay whose results differ from an eager run of the same inputs."""

    key: GraphKey
    digest: str  # of the inputs
    differences: tuple[OutputDifference, ...]
    path: Path | None  # of the file with the inputs

    @property
    def reason(self) -> str:
        """Text for clients, which does not name the file."""
        more = f" (and {len(self.differences) - 1} more results)" if self.differences[1:] else ""
        return (
            f"graph [{self.key}] is out of service: it differs from an eager run of inputs {self.digest}: "
            f"{self.differences[0]}{more}"
        )

    def __str__(self) -> str:
        kept = "could not be saved" if self.path is None else f"are in {self.path}: `saccade replay` runs them again"
        return f"{self.reason}. Its batches run without it; the inputs {kept}"


class Shadow:
    """Records an engine's replays, and checks them one at a time."""

    def __init__(
        self, executor: DeviceExecutor, share: float, origin: Origin, *, slab_bytes: Mapping[str, int]
    ) -> None:
        """`slab_bytes` has the sizes of the slabs for language and vision passes, see `sizes.shadow_bytes_for`."""
        self._executor, self._share, self._origin = executor, share, origin
        device = executor.state.model.place.device
        self._slabs = {name: Slab(nbytes, device) for name, nbytes in slab_bytes.items()}
        self.writers = Writers(executor.state)
        self._counts: dict[str, Counter[str]] = {phase.phase.name: Counter() for phase in executor.phases}
        self._records: deque[ReplayRecord] = deque()
        self._chance = Random(0)
        self._due = 0
        self._recorded: OrderedDict[GraphKey, None] = OrderedDict()  # the most recently recorded is last
        for phase in executor.phases:
            phase.observer = _Watcher(self, phase)

    def close(self) -> None:
        """Stops watching and releases the executor."""
        for phase in self._executor.phases:
            phase.observer = None
        self._records.clear()

    @property
    def has_records(self) -> bool:
        return bool(self._records)

    def counts(self, phase: str) -> dict[str, int]:
        """Counts of records by result: equal, different, or the reason why nothing was compared."""
        return dict(self._counts[phase])

    def count(self, phase: str, result: str) -> None:
        self._counts[phase][result] += 1

    def slab_for(self, runner: GraphRunner) -> Slab:
        return self._slabs["vision" if runner is self._executor.vision else "language"]

    def wants(self, key: GraphKey) -> bool:
        """Whether to record this replay. Chance decides how many; recently recorded graphs may yield to rarer ones."""
        self._due = min(self._due + (self._chance.random() < self._share), MAX_DUE)
        if self._due == 0 or (self._due < MAX_DUE and self._share < 1 and self._is_recent(key)):
            return False
        self._due -= 1
        self._recorded[key] = None
        self._recorded.move_to_end(key)
        return True

    def keep(self, record: ReplayRecord) -> None:
        self._records.append(record)
        if len(self._records) > MAX_RECORDS:
            self._drop(self._records.popleft(), "evicted")

    @torch.no_grad()
    def check(self, should_stop: ShouldStop = lambda: False) -> Mismatch | Exception | None:
        """Reruns one record. Returns the error that prevented it, or a mismatch, after which caches must be emptied."""
        record = self._next(should_stop)
        if record is None:
            return None
        record.is_begun = True
        try:
            with _Interruptible(should_stop, record.runner.phase.arena.device):
                found = self._compare(record)
        except CheckStoppedError:
            self._postpone(record)
            return None
        except Exception as error:
            self._drop(record, "failed")
            return error
        mismatch = None if found is None else self._report(record, *found)
        record.cached = None  # the slab keeps the record, and so this memory, until its place is reused
        return mismatch

    def _is_recent(self, key: GraphKey) -> bool:
        """Whether a graph is in the more recently recorded half of all graphs."""
        newest = islice(reversed(self._recorded), len(self._recorded) // 2)
        return key in set(newest)

    def _next(self, should_stop: ShouldStop) -> ReplayRecord | None:
        while self._records and not should_stop():
            record = self._records.popleft()
            if record.is_lost:
                self._drop(record, "evicted")
            elif not self.writers.is_intact(record.arrays, record.number):
                self._drop(record, "overwritten")
            else:
                return record
        return None

    def _postpone(self, record: ReplayRecord) -> None:
        """Puts the record first in line for a later check."""
        self.count(record.key.phase, "interrupted")
        if "slots" not in record.arrays:
            record.cached = None  # other passes may write there meanwhile; the check did not
        self._records.appendleft(record)

    def _drop(self, record: ReplayRecord, why: str) -> None:
        """Gives up on the record. What its check wrote counts as a pass: the keys and values may no longer be those
        that other replays read."""
        self.count(record.key.phase, why)
        if record.is_begun and "slots" in record.arrays:
            self.writers.note({"slots": record.arrays["slots"]})

    def _compare(self, record: ReplayRecord) -> Found | None:
        """The differences and the eager results, or None if there is nothing to report."""
        if record.cached is None:
            record.cached = self._cached(record)
        found = self._run_again(record, {**record.results, **record.cached})
        if found is None:
            self.count(record.key.phase, "equal")
        elif record.runner.phase.nondeterministic or self._run_again(record, found[1]) is not None:
            self._drop(record, "unsteady")  # eager runs differ from each other, so the graph may be right
            return None
        return found

    def _run_again(self, record: ReplayRecord, before: Tensors) -> Found | None:
        phase, most_bytes = record.runner.phase, self.slab_for(record.runner).most_bytes

        def compare(outputs: Tensors) -> Found | None:
            now = results_of(phase, record.arrays, outputs, most_bytes) | self._cached(record, outputs)
            differences = bit_differences(before, now)
            return (differences, {name: view.clone() for name, view in now.items()}) if differences else None

        put_back(phase, record.arrays, record.reads)
        return run_eagerly(record.runner, {**record.inputs, **record.arrays}, compare, like=record.key)

    def _cached(self, record: ReplayRecord, outputs: Tensors | None = None) -> dict[str, Tensor]:
        """What a replay wrote to caches. With the `outputs` of an eager run, what that run would have written."""
        state, most_bytes = self._executor.state, self.slab_for(record.runner).most_bytes
        if "targets" not in record.arrays:
            return written_keys(state, record.arrays, most_bytes)
        own = self.writers.own_rows(record.arrays, record.number)
        own = own[:: max(1, -(-len(own) * state.vision_row_bytes // most_bytes))]
        if outputs is None:
            return written_rows(state, record.arrays, own)
        rows = outputs["rows"]
        return {"rows of the cache": rows.index_select(1, torch.from_numpy(own).to(rows.device))}

    def _report(self, record: ReplayRecord, differences: list[OutputDifference], right: Tensors) -> Mismatch:
        """Retires the graph, and saves what is needed to replay the record."""
        self.count(record.key.phase, "different")
        digest = digest_of({**record.inputs, **record.reads}, record.arrays)
        record.runner.catalogue.retire(record.key, f"a shadow check found it wrong (digest {digest})")
        for other in self._records:  # they may have read what the wrong graph wrote, which the check overwrote
            self.count(other.key.phase, "overwritten")
        self._records.clear()
        path = self._save(record, right, digest)
        return Mismatch(key=record.key, digest=digest, differences=tuple(differences), path=path)

    def _save(self, record: ReplayRecord, right: Tensors, digest: str) -> Path | None:
        """Returns the path of the new file, or None if there is no folder for it or it could not be written."""
        assert record.cached is not None, "it was compared"
        if self._origin.folder is None:
            return None
        try:
            file = ShadowFile(
                origin=self._origin,
                key=record.key,
                arrays=record.arrays,
                inputs=record.inputs,
                reads=record.reads,
                cached=context_of(self._executor.state, record.arrays),
                replayed={**record.results, **record.cached},
                eager=right,
                most_bytes=self.slab_for(record.runner).most_bytes,
                digest=digest,
                versions=current_versions(record.runner.phase.arena.device),
            )
            return write_file(self._origin.folder, file)
        except (OSError, SafetensorError, RuntimeError):  # no permission, or a full disk or device
            return None


class _Watcher:
    """Sees the passes of one phase and records some. Failures are counted, so that they never affect a request."""

    def __init__(self, shadow: Shadow, runner: GraphRunner) -> None:
        self._shadow, self._runner = shadow, runner
        self._open: ReplayRecord | None = None

    def before(self, batch: Batch, key: GraphKey | None) -> None:
        self._open = None
        number = self._shadow.writers.note(batch.arrays)
        if key is None or not self._shadow.wants(key):
            return
        with self._counting_failures():
            arrays = {name: np.array(array) for name, array in batch.arrays.items()}
            record = ReplayRecord(runner=self._runner, key=key, number=number, arrays=arrays)
            reads = self._runner.phase.volatile_in(arrays)
            copies = self._shadow.slab_for(self._runner).copy(record, {**batch.tensors, **reads})
            record.inputs = {name: copies[name] for name in batch.tensors}
            record.reads = {name: copies[name] for name in reads}
            self._open = record

    def after(self, outputs: Tensors) -> None:
        record, self._open = self._open, None
        if record is None:
            return
        with self._counting_failures():
            slab = self._shadow.slab_for(self._runner)
            found = results_of(self._runner.phase, record.arrays, outputs, slab.most_bytes)
            record.results = slab.copy(record, found)
            self._shadow.keep(record)

    @contextmanager
    def _counting_failures(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._shadow.count(self._runner.phase.name, "too_large" if isinstance(error, TooLargeError) else "failed")


class CheckStoppedError(Exception):
    """A check was stopped because a command is waiting."""


class _Interruptible(OperationMode):
    """Checks `should_stop` before each operation. The device is at most one operation behind, so it is soon free."""

    def __init__(self, should_stop: ShouldStop, device: torch.device) -> None:
        super().__init__()
        self._should_stop = should_stop
        self._events = [torch.cuda.Event() for _ in range(2)] if device.type == "cuda" else []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._should_stop():
            raise CheckStoppedError
        result = func(*args, **(kwargs or {}))
        if self._events:
            self._events[0].record()
            self._events.reverse()
            self._events[0].synchronize()
        return result

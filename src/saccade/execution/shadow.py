"""Shadow checks: a share of live replays is rerun eagerly and compared bit for bit.

What a replay read and produced is copied on the replay's stream into preallocated memory, without waiting. The eager
run happens when the engine is idle, and stops between two operations when a command arrives. It changes nothing that a
request could see, because it writes the bits that the caches already hold. If the bits differ, the graph was wrong:
the graph is retired, the caches are emptied, and the inputs are saved to a file.

Of several ranks, each records its own part of the same replays: all see the same passes and draw the same numbers. Rank
0 says which record is next. A record that some rank could not keep is dropped by all. A check is the same pass on all
ranks, because a pass exchanges tensors, so none of them may stop it; and what any rank finds counts for all.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from saccade.execution.executor import DeviceExecutor
from saccade.execution.interruptible import CheckStoppedError, Interruptible, ShouldStop
from saccade.execution.shadow_file import Origin, ShadowFile, context_of, current_versions, digest_of, write_file
from saccade.execution.shadow_passes import (
    PassArrays,
    Slab,
    TooLargeError,
    Writers,
    put_back,
    results_of,
    run_eagerly,
    vision_rows_in,
    written_keys,
    written_rows,
)
from saccade.execution.shadow_verdict import Mismatch, Verdict, gather_differences
from saccade.graphs import Batch, GraphKey, GraphRunner
from saccade.graphs.compare import OutputDifference, Tensors, bit_differences
from saccade.layers.parallel import ALONE, ParallelGroup
from saccade.scheduling.orders import CheckReplay

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


class Shadow:
    """Records an engine's replays, and checks them one at a time."""

    def __init__(
        self,
        executor: DeviceExecutor,
        share: float,
        origin: Origin,
        *,
        slab_bytes: Mapping[str, int],
        group: ParallelGroup = ALONE,
    ) -> None:
        """`slab_bytes` has the sizes of the slabs for language and vision passes, see `sizes.shadow_bytes_for`. All
        ranks of the group begin after the same pass."""
        self._executor, self._share, self._origin, self._group = executor, share, origin, group
        device = executor.state.model.place.device
        self._slabs = {name: Slab(nbytes, device) for name, nbytes in slab_bytes.items()}
        self.writers = Writers(executor.state)
        self._counts: dict[str, Counter[str]] = {phase.phase.name: Counter() for phase in executor.phases}
        self._records: deque[ReplayRecord] = deque()
        self._chance = Random(0)
        self._due = 0
        self._recorded: OrderedDict[GraphKey, None] = OrderedDict()  # the most recently recorded is last
        self.order_all: Callable[[CheckReplay], Mismatch | None] | None = None  # on rank 0 of several
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
        """Reruns one record. Returns the error that prevented it, or a mismatch, after which caches must be emptied.
        Several ranks stop only before the check begins, because all take part in it."""
        if self.order_all is not None:
            try:
                chosen = self.choose(should_stop)
                return None if chosen is None else self.order_all(CheckReplay(*chosen))
            except Exception as error:
                return error
        record = self._next(should_stop)
        if record is None:
            return None
        try:
            with Interruptible(should_stop, record.runner.phase.arena.device):
                verdict = self._compare(record)
        except CheckStoppedError:
            self._postpone(record)
            return None
        except Exception as error:
            self._drop(record, "failed")
            return error
        return self._conclude(record, verdict)

    def choose(self, should_stop: ShouldStop = lambda: False) -> tuple[int, GraphKey] | None:
        """Rank 0's choice of what all ranks check next: the number of a record, and its graph."""
        record = self._next(should_stop)
        if record is None:
            return None
        self._records.appendleft(record)
        return record.number, record.key

    @torch.no_grad()
    def check_together(self, number: int, key: GraphKey) -> Mismatch | None:
        """Reruns the record that rank 0 chose, at the same time as all other ranks. Raises if this rank fails."""
        while self._records and self._records[0].number < number:
            self._records.popleft()  # rank 0 has dropped it
        is_kept = bool(self._records) and (self._records[0].number, self._records[0].key) == (number, key)
        record = self._records.popleft() if is_kept else None
        problems = self._group.gather(("evicted" if record is None else self._problem_of(record)).encode())
        problem = next(filter(None, problems), b"").decode()
        if record is None or problem:
            if record is not None:
                self._drop(record, problem)
            return None
        try:
            verdict = self._compare(record)
        except Exception:
            self._drop(record, "failed")
            raise
        return self._conclude(record, verdict)

    def _is_recent(self, key: GraphKey) -> bool:
        """Whether a graph is in the more recently recorded half of all graphs."""
        newest = islice(reversed(self._recorded), len(self._recorded) // 2)
        return key in set(newest)

    def _next(self, should_stop: ShouldStop) -> ReplayRecord | None:
        while self._records and not should_stop():
            record = self._records.popleft()
            if not (problem := self._problem_of(record)):
                return record
            self._drop(record, problem)
        return None

    def _problem_of(self, record: ReplayRecord) -> str:
        """Why a record cannot be checked any more."""
        if record.is_lost:
            return "evicted"
        return "" if self.writers.is_intact(record.arrays, record.number) else "overwritten"

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

    def _compare(self, record: ReplayRecord) -> Verdict | None:
        """What differs, or None if there is nothing to report."""
        record.is_begun = True
        if record.cached is None:
            record.cached = self._cached(record)
        found = self._run_again(record, {**record.results, **record.cached})
        if found.is_equal:
            self.count(record.key.phase, "equal")
            return None
        if record.runner.phase.nondeterministic or not self._run_again(record, found.right).is_equal:
            self._drop(record, "unsteady")  # eager runs differ from each other, so the graph may be right
            return None
        return found

    def _run_again(self, record: ReplayRecord, before: Tensors) -> Verdict:
        phase, most_bytes = record.runner.phase, self.slab_for(record.runner).most_bytes
        right = before

        def compare(outputs: Tensors) -> list[OutputDifference]:
            nonlocal right
            now = results_of(phase, record.arrays, outputs, most_bytes) | self._cached(record, outputs)
            differences = bit_differences(before, now)
            if differences:
                right = {name: view.clone() for name, view in now.items()}
            return differences

        put_back(phase, record.arrays, record.reads)
        own = run_eagerly(record.runner, {**record.inputs, **record.arrays}, compare, like=record.key)
        return Verdict(gather_differences(self._group, own), right)

    def _cached(self, record: ReplayRecord, outputs: Tensors | None = None) -> dict[str, Tensor]:
        """What a replay wrote to caches. With the `outputs` of an eager run, what that run would have written."""
        state, most_bytes = self._executor.state, self.slab_for(record.runner).most_bytes
        if "targets" not in record.arrays:
            return written_keys(state, record.arrays, most_bytes)
        own = self.writers.own_rows(record.arrays, record.number)
        own = own[:: max(1, -(-len(own) * state.vision_row_bytes // most_bytes))]
        if outputs is None:
            return written_rows(state, record.arrays, own)
        return {"rows of the cache": vision_rows_in(outputs, own)}

    def _conclude(self, record: ReplayRecord, verdict: Verdict | None) -> Mismatch | None:
        mismatch = None if verdict is None else self._report(record, verdict)
        record.cached = None  # the slab keeps the record, and so this memory, until its place is reused
        return mismatch

    def _report(self, record: ReplayRecord, verdict: Verdict) -> Mismatch:
        """Retires the graph, and saves what is needed to replay the record: each rank its own part."""
        self.count(record.key.phase, "different")
        digest = digest_of({**record.inputs, **record.reads}, record.arrays)
        digest = self._group.gather(digest.encode())[0].decode()
        record.runner.catalogue.retire(record.key, f"a shadow check found it wrong (digest {digest})")
        for other in self._records:  # they may have read what the wrong graph wrote, which the check overwrote
            self.count(other.key.phase, "overwritten")
        self._records.clear()
        path = self._save(record, verdict.right, digest)
        is_saved = all(self._group.gather(b"" if path is None else b"saved"))
        return Mismatch(key=record.key, digest=digest, by_rank=verdict.by_rank, path=path if is_saved else None)

    def _save(self, record: ReplayRecord, right: Tensors, digest: str) -> Path | None:
        """Returns the path of the new file, or None if there is no folder for it or it could not be written."""
        assert record.cached is not None, "it was compared"
        if self._origin.folder is None:
            return None
        try:
            file = ShadowFile(
                origin=self._origin,
                rank=self._group.rank,
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

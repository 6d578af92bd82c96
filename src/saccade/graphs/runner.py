"""Runs a phase: fills the buffers, replays the chosen graph, and hands over the outputs."""

import gc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from saccade.choice.catalogue import Catalogue
from saccade.choice.costs import TierCosts, measure
from saccade.choice.exact import ExactIndex, ExactLayout
from saccade.choice.key import Capacity, Decision, GraphKey
from saccade.config import GraphSettings, Tier
from saccade.errors import ConfigError, GraphError
from saccade.graphs.arena import Arena, Batch, HostArray
from saccade.graphs.buffers import Role
from saccade.graphs.capture import CapturedGraph, capture
from saccade.graphs.frame import Frame, run_body
from saccade.graphs.lane import Lane, OneUser, lane_for
from saccade.graphs.phase import Outputs, Phase
from saccade.graphs.stats import GraphStats
from saccade.graphs.watched import Watched

Result = TypeVar("Result")
Consume = Callable[[Outputs], Result]
Progress = Callable[[int, int, GraphKey], None]

NUM_TIMED_SIZES = 7
MAX_TIMED_ROWS = 2048  # beyond this, time grows in proportion
NUM_REPLAY_ROUNDS = 2


class Observer(Protocol):
    """Sees every pass of `GraphRunner.run` and `obey`, in order. It must neither wait nor raise."""

    def before(self, batch: Batch, key: GraphKey | None) -> None:
        """The batch is about to be replayed in the graph of this key or, with None, to run eagerly."""
        ...

    def after(self, outputs: Outputs) -> None:
        """Gets the valid rows of the outputs, which the next pass overwrites."""
        ...


@dataclass(slots=True)
class _Begun:
    """A batch that is replayed in parts: how many have run, and the number of uses of the lane when it was last run."""

    graph: CapturedGraph
    batch: Batch
    consume: Consume[object]
    num_uses: int
    num_done: int = 0


class GraphRunner:
    """Runs a phase. The catalogue knows its graphs and decides; every decision not to replay has a reason and is
    counted. `run` decides and executes; `obey` executes a decision that was made elsewhere with the same catalogue."""

    def __init__(self, phase: Phase, settings: GraphSettings | None = None, lane: Lane | None = None) -> None:
        self.phase = phase
        self.settings = settings or GraphSettings()
        self.stats = GraphStats()
        self.catalogue = Catalogue(phase.shape, self.settings)
        self.observer: Observer | None = None
        self.selfcheck: float | None = None  # the largest difference found by the last verification
        self.lane = lane or lane_for(phase.arena.device)
        self._graphs: dict[GraphKey, CapturedGraph] = {}
        self.last: GraphKey | str = ""  # how the last batch ran: the key of its graph, or "... eager ..."
        self.last_rows = 0  # rows of the last batch, without padding
        self._outputs = [buffer for buffer in phase.arena.buffers.values() if buffer.role is Role.OUTPUT]
        self.watched = Watched.of(phase.state) | Watched.of_body(phase.body)
        self._begun: _Begun | None = None
        self._exclusive = OneUser(phase.name, self.lane)

    def key_of(self, batch: Batch) -> GraphKey:
        """The key of an exact graph for this batch's structure."""
        return self.catalogue.key(batch.sizes, batch.structure)

    @property
    def graphs(self) -> tuple[CapturedGraph, ...]:
        return tuple(self._graphs.values())

    def snapshot(self) -> dict[str, Any]:
        """Counters and every graph, as plain data for metrics and pages."""
        graphs = [
            {
                "key": str(graph.key),
                "tier": Tier.EXACT.value if graph.key.digest else Tier.CAPACITY.value,
                "bytes": graph.nbytes,
                "capture_seconds": graph.capture_s,
                "replays": graph.num_replays,
                "out_of_service": self.catalogue.retired.get(graph.key),
            }
            for graph in self.graphs
        ]
        return {"phase": self.phase.name, "selfcheck": self.selfcheck, **self.stats.snapshot(), "graphs": graphs}

    def capture_buckets(self, progress: Progress | None = None, *, largest_only: bool = False) -> None:
        """Capture every bucket, largest first, so that smaller ones fit into the memory of the largest. `largest_only`
        captures only the largest, to measure the memory that all of them need."""
        if Tier.CAPACITY not in self.settings.tiers:
            return
        buckets = self.catalogue.shape.ordered[::-1][: 1 if largest_only else None]
        for done, bucket in enumerate(buckets):
            key = self.catalogue.key(bucket)
            if progress:
                progress(done, len(buckets), key)
            with self._exclusive:
                self.phase.arena.fill(self.example_for(bucket), bucket)
                self._graphs[key] = self._capture(key)
            self.catalogue.captured.add(key)

    def calibrate(self, num_rounds: int = 0) -> TierCosts:
        """Time eager runs and replays of a few buckets; from then on the catalogue chooses the cheaper. Small sizes are
        sampled more densely, because there eager runs turn from host-bound to device-bound."""
        by_rows = self._timed_examples()
        ways = (lambda rows: self._eager(by_rows[rows]), lambda rows: self._replay_in_bucket(by_rows[rows]))
        self.catalogue.costs = costs = TierCosts(*measure(ways, list(by_rows), self._wait, num_rounds))
        self.catalogue.seconds = costs.graph
        return costs

    def time_replays(self) -> None:
        """Time replays only, if there are graphs, so that a scheduler knows how long a step will take. The number of
        rounds is fixed, because every rank must run equally many."""
        if not self._graphs:
            return
        by_rows = self._timed_examples(MAX_TIMED_ROWS)
        ways = [lambda rows: self._replay_in_bucket(by_rows[rows])]
        [self.catalogue.seconds] = measure(ways, list(by_rows), self._wait, NUM_REPLAY_ROUNDS)

    def _timed_examples(self, max_rows: int | None = None) -> dict[int, Batch]:
        ordered = self.catalogue.shape.ordered
        buckets = [one for one in ordered if max_rows is None or one[self.phase.rows] <= max_rows] or ordered[:1]
        last = len(buckets) - 1
        picked = sorted({round(last * (i / (NUM_TIMED_SIZES - 1)) ** 2) for i in range(NUM_TIMED_SIZES)})
        return {buckets[i][self.phase.rows]: self.example_for(buckets[i]) for i in picked}

    def _wait(self) -> None:
        if self.phase.arena.device.type == "cuda":
            torch.cuda.synchronize(self.phase.arena.device)

    def forget_exact(self) -> None:
        """Drop all exact graphs and the counts that led to them."""
        self.drop([key for key in self._graphs if key.digest])
        self.catalogue.exact = ExactIndex(self.catalogue.settings)

    def capture_exact(self, values: Mapping[str, Any]) -> None:
        """Capture an exact graph for a batch's structure, if batches of its size would be replayed in it."""
        batch = self.phase.arena.admit(values)
        layout = self.catalogue.layout(batch.sizes, batch.structure)
        if layout is not None:
            self._add_exact(layout)

    def capture_hot(self, limit: int = 1) -> list[GraphKey]:
        """Capture up to `limit` hot layouts. Call only when idle, never on the path of a request."""
        captured: list[GraphKey] = []
        while len(captured) < limit and (layout := self.catalogue.exact.next_pending()) is not None:
            self._add_exact(layout)
            captured.append(layout.key)
        return captured

    def _add_exact(self, layout: ExactLayout) -> None:
        self.drop(self.catalogue.exact.add(layout.key, self.capture_layout(layout)))

    def capture_layout(self, layout: ExactLayout) -> int:
        """Capture an exact graph. Returns the bytes it added to its pool. Takes tens of milliseconds, so call it only
        when idle."""
        self.drop(layout.dropped)
        with self._exclusive:
            graph = self._graphs[layout.key] = self._capture_exact(layout)
        return graph.nbytes

    def drop(self, keys: Iterable[GraphKey]) -> None:
        for key in keys:
            self._graphs.pop(key, None)

    def decide(self, batch: Batch) -> Decision:
        """How a batch would run. A pure function that touches no device."""
        return self.catalogue.decide(batch.sizes, batch.structure)

    def run(self, values: Mapping[str, Any], consume: Consume[Result]) -> Result:
        """Run one batch. `consume` gets views of the valid output rows, which the next replay overwrites: it may
        reduce, scatter or copy them (`copy_out`), but not keep them."""
        return self.obey(None, values, consume)

    def obey(self, decision: Decision | None, values: Mapping[str, Any], consume: Consume[Result]) -> Result:
        """Run one batch as decided or, without a decision, as the catalogue chooses now. `consume` as in `run`."""
        with self._exclusive:
            batch, decision, consume = self._admit(decision, values, consume)
            if decision.key is not None:
                return self._replay(decision.key, batch, consume)
            self.last = f"{self.phase.name} eager {decision.padded_to or batch.sizes}"
            return self._hand_over(self._eager(batch, decision.padded_to), batch, consume)

    def begin(self, decision: Decision, values: Mapping[str, Any], consume: Consume[object]) -> None:
        """Begin a batch that has a graph; `advance` replays it in parts. Meanwhile other lanes may run, but nothing in
        this one."""
        assert decision.key is not None, "an eager run has no parts"
        with self._exclusive:
            batch, _, consume = self._admit(decision, values, consume)
            graph = self._prepare(decision.key, batch)
            self._begun = _Begun(graph, batch, consume, self.lane.num_uses)

    def advance(self, key: GraphKey | None, end: int, num_parts: int) -> None:
        """Replay the batch that was begun with this key, up to part `end` of `num_parts`."""
        with self._exclusive:
            begun, self._begun = self._begun, None
            if begun is None or begun.graph.key != key or begun.num_uses != self.lane.num_uses - 1:
                raise GraphError(f"no pass in graph [{key}] is unfinished, or its memory was used since")
            graph = begun.graph
            if graph.num_parts != num_parts or not begun.num_done < end <= num_parts:
                has = f"graph [{graph.key}] has {graph.num_parts} parts, of which {begun.num_done} are done"
                raise GraphError(f"{has}; it cannot go on to part {end} of {num_parts}")
            graph.replay(begun.num_done, end)
            self.last = f"{graph.key} to part {end}/{num_parts}"
            if end == num_parts:
                self._hand_over(graph.frame, begun.batch, begun.consume)
            else:
                begun.num_done, begun.num_uses = end, self.lane.num_uses
                self._begun = begun

    def eager(
        self, values: Mapping[str, Any], consume: Consume[Result], *, at: Capacity | None = None, poison: bool = False
    ) -> Result:
        """Run one batch without a graph on the same buffers, unpadded or padded to `at`. `poison` fills padded rows
        with NaN, which must not change valid ones."""
        with self._exclusive:
            batch = self.phase.arena.admit(values)
            return self._hand_over(self._eager(batch, at, poison=poison), batch, consume)

    def replay(self, key: GraphKey, batch: Batch, consume: Consume[Result], *, poison: bool = False) -> Result:
        """Replay a graph on a batch that fits it; `poison` as in `eager`."""
        with self._exclusive:
            return self._replay(key, batch, consume, poison=poison)

    def _admit(
        self, decision: Decision | None, values: Mapping[str, Any], consume: Consume[Result]
    ) -> tuple[Batch, Decision, Consume[Result]]:
        batch = self.phase.arena.admit(values)
        if decision is None:
            decision = self.catalogue.choose(batch.sizes, batch.structure)
        key, real_rows = decision.key, batch.sizes[self.phase.rows]
        self.last_rows = real_rows
        self.stats.count(decision, real_rows, key.capacity[self.phase.rows] if key else real_rows)
        if self.observer is not None:
            self.observer.before(batch, key)
            consume = _observed(consume, self.observer)
        return batch, decision, consume

    def _replay(self, key: GraphKey, batch: Batch, consume: Consume[Result], *, poison: bool = False) -> Result:
        graph = self._prepare(key, batch, poison=poison)
        graph.replay()
        return self._hand_over(graph.frame, batch, consume)

    def _prepare(self, key: GraphKey, batch: Batch, *, poison: bool = False) -> CapturedGraph:
        """The graph of a key, with its buffers filled."""
        self.last = key
        graph = self._graphs.get(key)
        if graph is None:
            raise GraphError(f"no graph is captured for [{key}]")
        arena = self.phase.arena
        if key.digest and key != self.key_of(batch):
            raise GraphError(
                f"graph [{key}] has a different structure from the batch, whose key is [{self.key_of(batch)}]"
            )
        arena.fill(batch, key.capacity)
        if poison:
            arena.poison(key.capacity, batch.sizes)
        if graph.key != key:
            raise GraphError(f"graph [{graph.key}] is stored under the key of [{key}]")
        return graph

    def example_for(self, bucket: Capacity) -> Batch:
        """A batch that fills a bucket as far as the example's structure allows."""
        return self.phase.arena.admit(self.example_values(bucket))

    def example_values(self, bucket: Capacity) -> Mapping[str, Any]:
        """The inputs of `example_for`."""
        rows = bucket[self.phase.rows]
        while rows:
            lengths = _lengths(rows, self.phase.typical or rows)
            values = self.phase.example(lengths, torch.Generator().manual_seed(rows))
            if self.phase.arena.misfit(self.phase.arena.admit(values).sizes, bucket) is None:
                return values
            rows //= 2
        raise ConfigError(f"no example of phase {self.phase.name} fits its bucket {bucket}")

    def _capture(
        self, key: GraphKey, structure: Mapping[str, HostArray] | None = None, *, is_warm: bool = False
    ) -> CapturedGraph:
        graph = self.record(key, structure, is_warm=is_warm)
        self.stats.captures += 1
        self.stats.capture_s += graph.capture_s
        return graph

    def record(
        self, key: GraphKey, structure: Mapping[str, HostArray] | None = None, *, is_warm: bool = False
    ) -> CapturedGraph:
        """Capture the body on the buffers as they are, without putting the graph into service."""
        phase = self.phase
        return capture(
            phase.body, key, phase.arena, self.lane, state=self.watched, structure=structure, is_warm=is_warm
        )

    def _capture_exact(self, layout: ExactLayout) -> CapturedGraph:
        """Fills in the boundaries only, and padding for all other metadata: a batch's own may say where results go, and
        a capture, which runs the body, must not write there again."""
        arena, key = self.phase.arena, layout.key
        views = arena.views(key.capacity)  # rows keep their content: only the structure matters to a capture
        rows = {name: views[name] for name, buffer in arena.buffers.items() if buffer.role is Role.INPUT}
        padding = arena.empty_batch().arrays
        structure = {name: np.array(array) for name, array in layout.structure.items()}  # copies: the frame keeps it
        arena.fill(Batch(rows, {**padding, **structure}, layout.sizes, structure), key.capacity)
        with torch.no_grad():  # on the current stream, whose reserved memory suffices; another would allocate its own
            run_body(self.phase.body, Frame(arena, key.capacity, structure, is_warmup=True))
        return self._capture(key, structure, is_warm=True)

    def _eager(self, batch: Batch, bucket: Capacity | None = None, *, poison: bool = False) -> Frame:
        """Without a bucket, runs at exactly the batch's size. A batch larger than the arena gets a temporary one."""
        arena, structure = self.phase.arena, None
        if bucket is None:
            bucket, structure = batch.sizes, batch.structure
            if any(bucket[name] > limit for name, limit in arena.limits.sizes):
                arena = Arena(list(arena.buffers.values()), bucket, arena.device)
        arena.fill(batch, bucket)
        if poison:
            arena.poison(bucket, batch.sizes)
        frame = Frame(arena, bucket, structure)
        with torch.no_grad():
            run_body(self.phase.body, frame)
        return frame

    def _replay_in_bucket(self, batch: Batch) -> None:
        bucket = self.catalogue.shape.bucket_for(batch.sizes)
        assert bucket is not None, f"{batch.sizes} was made to fit a bucket"
        self.replay(self.catalogue.key(bucket), batch, lambda outputs: None)

    def _hand_over(self, frame: Frame, batch: Batch, consume: Consume[Result]) -> Result:
        arena, names = frame.arena, [buffer.name for buffer in self._outputs]
        num_before = arena.num_views(names)
        result = consume(self._valid_outputs(frame, batch))
        if arena.num_views(names) != num_before:
            gc.collect()  # a view in an unreachable cycle is not kept
            if arena.num_views(names) > num_before:
                raise GraphError(
                    f"the consumer of {self.phase.name} kept a view of an output buffer ({', '.join(names)}), in what "
                    "it returned or elsewhere; the next replay overwrites it: copy it"
                )
        return result

    def _valid_outputs(self, frame: Frame, batch: Batch) -> dict[str, Tensor]:
        outputs = {}
        for buffer in self._outputs:
            view = frame[buffer.name]
            if buffer.axis is not None and buffer.dimension is not None:
                name, extra = buffer.dimension
                view = view.narrow(buffer.axis, 0, batch.sizes[name] + extra)
            outputs[buffer.name] = view
        return outputs


def _observed(consume: Consume[Result], observer: Observer) -> Consume[Result]:
    def call(outputs: Outputs) -> Result:
        observer.after(outputs)
        return consume(outputs)

    return call


def _lengths(rows: int, typical: int) -> tuple[int, ...]:
    whole, rest = divmod(rows, typical)
    return (typical,) * whole + ((rest,) if rest else ())

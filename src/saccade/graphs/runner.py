"""The runner: for every batch choose how to run it, fill the buffers, replay, and hand the outputs over."""

import gc
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from saccade.config import GraphSettings, Tier
from saccade.errors import ConfigError, GraphError
from saccade.graphs.arena import Array, Batch
from saccade.graphs.buffers import Role
from saccade.graphs.capture import CapturedGraph, capture
from saccade.graphs.exact import ExactGraphs
from saccade.graphs.exclusive import Exclusive
from saccade.graphs.frame import Frame, eager_frame, run_body
from saccade.graphs.gate import Gate, measure
from saccade.graphs.key import Capacity, GraphKey, structure_digest
from saccade.graphs.lane import Lane, lane_for
from saccade.graphs.phase import Outputs, Phase
from saccade.graphs.stats import Decision, Reason, Stats
from saccade.graphs.watched import Watched

Result = TypeVar("Result")
Progress = Callable[[int, int, GraphKey], None]

NUM_GATE_SIZES = 7


class Observer(Protocol):
    """Sees every pass that `GraphRunner.run` makes, in order. It must neither wait nor raise."""

    def before(self, batch: Batch, key: GraphKey | None) -> None:
        """The batch is about to be replayed in the graph of this key; None: to be run eagerly."""
        ...

    def after(self, outputs: Outputs) -> None:
        """Valid rows of what it gave, which the next pass overwrites."""
        ...


class GraphRunner:
    """Runs a phase. Whoever decides not to replay says why, and the reason is counted."""

    def __init__(self, phase: Phase, settings: GraphSettings | None = None, lane: Lane | None = None) -> None:
        self.phase = phase
        self.settings = settings or GraphSettings()
        self.stats = Stats()
        self.gate: Gate | None = None
        self.observer: Observer | None = None
        self.selfcheck: float | None = None  # the largest difference that the last verification found
        self._lane = lane or lane_for(phase.arena.device)
        self._buckets = tuple(sorted(phase.buckets, key=lambda bucket: (bucket[phase.rows], sum(bucket.values()))))
        self._bucket_rows = [bucket[phase.rows] for bucket in self._buckets]
        self._graphs: dict[GraphKey, CapturedGraph] = {}
        self._retired: dict[GraphKey, str] = {}
        self._exact = ExactGraphs(self.settings)
        self._outputs = [buffer for buffer in phase.arena.buffers.values() if buffer.role is Role.OUTPUT]
        self._state = Watched.of(phase.state) | Watched.of_body(phase.body)
        self._alone = Exclusive(phase.name, self._lane.lock)

    @property
    def lane(self) -> Lane:
        return self._lane

    @property
    def watched(self) -> Watched:
        """What the body relies on besides its arena."""
        return self._state

    def key_of(self, batch: Batch) -> GraphKey:
        """The key of a graph of this batch's structure alone."""
        return self._key(batch.sizes, batch.structure)

    @property
    def graphs(self) -> tuple[CapturedGraph, ...]:
        return (*self._graphs.values(), *self._exact.graphs)

    @property
    def exact(self) -> ExactGraphs:
        return self._exact

    def snapshot(self) -> dict[str, Any]:
        """Counters and every graph, as plain data for metrics and pages."""
        graphs = [
            {
                "key": str(graph.key),
                "tier": Tier.EXACT.value if graph.key.digest else Tier.CAPACITY.value,
                "bytes": graph.nbytes,
                "capture_seconds": graph.capture_s,
                "replays": graph.num_replays,
                "out_of_service": self._retired.get(graph.key),
            }
            for graph in self.graphs
        ]
        return {"phase": self.phase.name, "selfcheck": self.selfcheck, **self.stats.snapshot(), "graphs": graphs}

    def capture_buckets(self, progress: Progress | None = None, *, largest_only: bool = False) -> None:
        """Capture every bucket, largest first, so that the smaller ones fit into the memory of the largest.

        `largest_only` captures just that one, to measure the memory that all of them will need.
        """
        if Tier.CAPACITY not in self.settings.tiers:
            return
        buckets = self._buckets[::-1][: 1 if largest_only else None]
        for done, bucket in enumerate(buckets):
            key = self._key(bucket)
            if progress:
                progress(done, len(buckets), key)
            with self._alone:
                self.phase.arena.fill(self.example_for(bucket), bucket)
                self._graphs[key] = self._capture(key)

    def calibrate(self) -> Gate:
        """Time eager runs and replays of a few buckets; from then on the cheaper one is chosen. Small ones lie closer
        together: there an eager run stops waiting for the host and starts to wait for the device."""
        last = len(self._buckets) - 1
        picked = sorted({round(last * (i / (NUM_GATE_SIZES - 1)) ** 2) for i in range(NUM_GATE_SIZES)})
        by_rows = {self._bucket_rows[i]: self.example_for(self._buckets[i]) for i in picked}
        ways = (lambda rows: self._eager(by_rows[rows]), lambda rows: self._replay_in_bucket(by_rows[rows]))
        self.gate = Gate(*measure(ways, list(by_rows), self._wait))
        return self.gate

    def retire(self, key: GraphKey, reason: str) -> None:
        """Never replay this graph again. Its batches take another graph of theirs, or run eagerly at the same size."""
        self._retired[key] = reason

    def forget_exact(self) -> None:
        """Let go of all graphs of one structure each, and of what was counted on the way to them."""
        self._exact = ExactGraphs(self.settings)

    def capture_exact(self, values: Mapping[str, Any]) -> None:
        """Capture a graph for the structure of a batch, if a batch of its size would be replayed in it."""
        batch = self.phase.arena.admit(values)
        key = self._key(batch.sizes, batch.structure)
        if key not in self._exact and self._is_worth_exact(batch):
            with self._alone:
                self._exact.add(key, batch, self._capture_exact)

    def reserve_small(self) -> None:
        """Hold memory for the small temporaries of graphs that may be captured later."""
        self._lane.reserve_small()

    def capture_hot(self, limit: int = 1) -> list[GraphKey]:
        """Capture layouts that came often enough. For idle moments: never call it on the path of a request."""
        with self._alone:
            return self._exact.capture_pending(self._capture_exact, limit)

    def decide(self, batch: Batch) -> Decision:
        """How a batch is to be run: pure, touches no device."""
        return self._decide(batch, self._exact_key(batch))

    def _decide(self, batch: Batch, exact_key: GraphKey | None) -> Decision:
        if not self.settings.tiers:
            return Decision(Tier.EAGER, Reason.GRAPHS_OFF)
        options = self._options(batch, exact_key)
        if not options:
            return self._explain_no_graph(batch)
        rows_by_tier = {tier: key.capacity[self.phase.rows] for tier, key in options.items()}
        gate = None if self.settings.strict else self.gate
        if gate is not None:
            tier = gate.cheapest({**rows_by_tier, Tier.EAGER: batch.sizes[self.phase.rows]})
        else:
            tier = min(rows_by_tier, key=rows_by_tier.__getitem__)
        if tier is Tier.EAGER:
            return Decision(tier, Reason.EAGER_FASTER)
        reason = Reason.EXACT_GRAPH if tier is Tier.EXACT else Reason.FITS_BUCKET
        return Decision(tier, reason, options[tier])

    def run(self, values: Mapping[str, Any], consume: Callable[[Outputs], Result]) -> Result:
        """Run one batch. `consume` gets views of the valid output rows, which the next replay overwrites: it may
        reduce, scatter or copy them (`copy_out`), but not keep them."""
        with self._alone:
            return self._run(self.phase.arena.admit(values), consume)

    def _run(self, batch: Batch, consume: Callable[[Outputs], Result]) -> Result:
        exact_key = self._exact_key(batch)
        decision = self._decide(batch, exact_key)
        real_rows = batch.sizes[self.phase.rows]
        graph_rows = decision.key.capacity[self.phase.rows] if decision.key else real_rows
        if decision.key is None and self.settings.strict and decision.reason is not Reason.GRAPHS_OFF:
            raise GraphError(f"{self.phase.name} batch of {batch.sizes} is not replayed: {decision} (--graphs-strict)")
        self.stats.count(decision, real_rows, graph_rows)
        if self.observer is not None:
            self.observer.before(batch, decision.key)
            consume = _observed(consume, self.observer)
        if decision.key is None:
            # With graphs off the same padded shapes are run, so that switching them off changes no answer by a bit.
            is_padded = decision.reason in (Reason.GRAPHS_OFF, Reason.OUT_OF_SERVICE)
            bucket = self.bucket_for(batch.sizes) if is_padded else None
            result = self._hand_over(self._eager(batch, bucket), batch, consume)
        else:
            result = self._replay(decision.key, batch, consume)
        if Tier.EXACT in self.settings.tiers:  # while the device is at work
            self._note_use(batch, decision, exact_key)
        return result

    def eager(
        self,
        values: Mapping[str, Any],
        consume: Callable[[Outputs], Result],
        *,
        at: Capacity | None = None,
        poison: bool = False,
    ) -> Result:
        """Run one batch without a graph, on the same buffers: unpadded, or padded to a capacity. `poison` fills padded
        rows with NaN: they must not matter."""
        with self._alone:
            batch = self.phase.arena.admit(values)
            return self._hand_over(self._eager(batch, at, poison=poison), batch, consume)

    def replay(
        self,
        key: GraphKey,
        batch: Batch,
        consume: Callable[[Outputs], Result],
        *,
        poison: bool = False,
    ) -> Result:
        """Replay a graph on a batch that fits it. `poison` is that of `eager`."""
        with self._alone:
            return self._replay(key, batch, consume, poison=poison)

    def _replay(
        self, key: GraphKey, batch: Batch, consume: Callable[[Outputs], Result], *, poison: bool = False
    ) -> Result:
        graph = self._graphs.get(key) or self._exact.get(key)
        if graph is None:
            raise GraphError(f"no graph is captured for [{key}]")
        arena = self.phase.arena
        arena.fill(batch, key.capacity)
        if poison:
            arena.poison(key.capacity, batch.sizes)
        graph.replay()
        return self._hand_over(graph.frame, batch, consume)

    def example_for(self, bucket: Capacity) -> Batch:
        """A batch that fills a bucket as far as the example's own structure lets it."""
        return self.phase.arena.admit(self.example_values(bucket))

    def example_values(self, bucket: Capacity) -> Mapping[str, Any]:
        """The inputs of that batch."""
        rows = bucket[self.phase.rows]
        while rows:
            lengths = _lengths(rows, self.phase.typical or rows)
            values = self.phase.example(lengths, torch.Generator().manual_seed(rows))
            if self.phase.arena.misfit(self.phase.arena.admit(values).sizes, bucket) is None:
                return values
            rows //= 2
        raise ConfigError(f"no example of phase {self.phase.name} fits its bucket {bucket}")

    def _key(self, capacity: Capacity, structure: Mapping[str, Array] | None = None) -> GraphKey:
        digest = structure_digest(structure) if structure is not None else ""
        return GraphKey(self.phase.name, self.settings.mode, capacity, digest)

    def _exact_key(self, batch: Batch) -> GraphKey | None:
        """The key of a graph of this structure alone, where there may be one."""
        if len(self._exact) or Tier.EXACT in self.settings.tiers:
            return self._key(batch.sizes, batch.structure)
        return None

    def _options(self, batch: Batch, exact_key: GraphKey | None) -> dict[Tier, GraphKey]:
        options = {}
        if exact_key is not None and len(self._exact) and self._exact.get(exact_key) is not None:
            options[Tier.EXACT] = exact_key
        bucket = self.bucket_for(batch.sizes)
        if bucket is not None and (key := self._key(bucket)) in self._graphs:
            options[Tier.CAPACITY] = key
        if self._retired:
            return {tier: key for tier, key in options.items() if key not in self._retired}
        return options

    def bucket_for(self, sizes: Mapping[str, int]) -> Capacity | None:
        """The smallest bucket that holds a batch of these sizes."""
        start = bisect_left(self._bucket_rows, sizes[self.phase.rows])
        fitting = (b for b in self._buckets[start:] if self.phase.arena.misfit(sizes, b) is None)
        return next(fitting, None)

    def _explain_no_graph(self, batch: Batch) -> Decision:
        if Tier.CAPACITY in self.settings.tiers and self._buckets and self.bucket_for(batch.sizes) is None:
            problem = self.phase.arena.misfit(batch.sizes, self._buckets[-1])
            return Decision(Tier.EAGER, Reason.TOO_LARGE, detail=problem or "")
        bucket = self.bucket_for(batch.sizes)
        keys = [self._exact_key(batch), None if bucket is None else self._key(bucket)] if self._retired else []
        for key in keys:
            if key is not None and key in self._retired:
                return Decision(Tier.EAGER, Reason.OUT_OF_SERVICE, detail=self._retired[key])
        return Decision(Tier.EAGER, Reason.NOT_CAPTURED)

    def _note_use(self, batch: Batch, decision: Decision, key: GraphKey | None) -> None:
        if decision.tier is Tier.EXACT and decision.key is not None:
            self._exact.use(decision.key)
        else:
            self._note_structure(batch, key)

    def _note_structure(self, batch: Batch, key: GraphKey | None = None) -> None:
        """Count a layout that a graph of its own might serve faster."""
        if (key is not None and key in self._exact) or not self._is_worth_exact(batch):
            return
        limits = self.phase.arena.limits  # of the same dimensions, in the same order
        if all(size <= limit for (_, size), (_, limit) in zip(batch.sizes.sizes, limits.sizes, strict=True)):
            self._exact.see(key or self._key(batch.sizes, batch.structure), batch)

    def _is_worth_exact(self, batch: Batch) -> bool:
        """Whether a batch would be run in a graph of its own, if it had one."""
        if self.gate is None:
            return True
        rows = batch.sizes[self.phase.rows]
        others = {tier: key.capacity[self.phase.rows] for tier, key in self._options(batch, None).items()}
        return self.gate.cheapest({Tier.EXACT: rows, Tier.EAGER: rows, **others}) is Tier.EXACT

    def _capture(
        self, key: GraphKey, structure: Mapping[str, Array] | None = None, *, is_warm: bool = False
    ) -> CapturedGraph:
        graph = self.record(key, structure, is_warm=is_warm)
        self.stats.captures += 1
        self.stats.capture_s += graph.capture_s
        return graph

    def record(
        self, key: GraphKey, structure: Mapping[str, Array] | None = None, *, is_warm: bool = False
    ) -> CapturedGraph:
        """Capture the body on what the buffers hold now, without putting the graph into service."""
        phase = self.phase
        return capture(
            phase.body, key, phase.arena, self._lane, state=self._state, structure=structure, is_warm=is_warm
        )

    def _capture_exact(self, key: GraphKey, batch: Batch) -> CapturedGraph:
        arena = self.phase.arena
        views = arena.views(key.capacity)  # rows keep what they hold: a capture depends on the structure alone
        rows = {name: views[name] for name, buffer in arena.buffers.items() if buffer.role is Role.INPUT}
        padding = arena.empty_batch().arrays
        arena.fill(Batch(rows, {**padding, **batch.structure}, batch.sizes, batch.structure), key.capacity)
        with torch.no_grad():  # on the current stream, which has memory for it: nothing may be allocated any more
            run_body(self.phase.body, Frame(arena, key.capacity, batch.structure, is_sketch=True))
        return self._capture(key, batch.structure, is_warm=True)

    def _eager(self, batch: Batch, bucket: Capacity | None = None, *, poison: bool = False) -> Frame:
        frame = eager_frame(self.phase.arena, batch) if bucket is None else self._padded_frame(batch, bucket, poison)
        with torch.no_grad():
            run_body(self.phase.body, frame)
        return frame

    def _padded_frame(self, batch: Batch, bucket: Capacity, poison: bool) -> Frame:
        self.phase.arena.fill(batch, bucket)
        if poison:
            self.phase.arena.poison(bucket, batch.sizes)
        return Frame(self.phase.arena, bucket)

    def _replay_in_bucket(self, batch: Batch) -> None:
        bucket = self.bucket_for(batch.sizes)
        assert bucket is not None, f"{batch.sizes} was made to fit a bucket"
        self.replay(self._key(bucket), batch, lambda outputs: None)

    def _hand_over(self, frame: Frame, batch: Batch, consume: Callable[[Outputs], Result]) -> Result:
        arena, names = frame.arena, [buffer.name for buffer in self._outputs]
        num_before = arena.num_views(names)
        result = consume(self._valid_outputs(frame, batch))
        if arena.num_views(names) != num_before:
            gc.collect()  # a view in a cycle that nobody can reach is not kept
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

    def _wait(self) -> None:
        if self.phase.arena.device.type == "cuda":
            torch.cuda.synchronize(self.phase.arena.device)


def _observed(consume: Callable[[Outputs], Result], observer: Observer) -> Callable[[Outputs], Result]:
    def call(outputs: Outputs) -> Result:
        observer.after(outputs)
        return consume(outputs)

    return call


def _lengths(rows: int, typical: int) -> tuple[int, ...]:
    """Segments of typical length and a rest."""
    whole, rest = divmod(rows, typical)
    return (typical,) * whole + ((rest,) if rest else ())

"""The executor carries out orders. It is the only code that launches anything, one per rank, and makes no decisions.

A run returns a ticket at once; only `DeviceTicket.wait` makes the host wait for the device. Later work is queued on the
same stream, so nothing that a ticket still needs is overwritten before it is copied.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from saccade.choice.catalogue import Catalogue
from saccade.choice.exact import ExactLayout
from saccade.choice.key import GraphKey
from saccade.config import GraphSettings, Mode, Tier
from saccade.errors import EngineDeadError
from saccade.execution.language import decode_phase, head_phase, prefill_phase
from saccade.execution.logits import Logits
from saccade.execution.pass_timer import DeviceLap, PassTimer, now
from saccade.execution.pooled_rows import Pooling
from saccade.execution.sampler import sample_phase
from saccade.execution.state import DeviceState
from saccade.execution.vision_encoder import Encoder, EncoderSettings
from saccade.graphs import GraphRunner, Phase, lane_for
from saccade.graphs.runner import Progress
from saccade.scheduling.arrays import CacheLayout
from saccade.scheduling.buckets import few_buckets
from saccade.scheduling.compose import USUAL_SIZES, Composer
from saccade.scheduling.executing import Encoded, StepResult
from saccade.scheduling.orders import (
    Begin,
    Calibrate,
    Capture,
    Drop,
    Encode,
    EncodeMore,
    GraphCheck,
    Orders,
    Pass,
    Run,
    SampleTokens,
    WarmUp,
)
from saccade.wire.trace_records import TracedPass
from saccade.wire.update import Scores

NUM_TICKETS = 3  # two steps may be in flight
EXACT_VISION_GRAPHS = len(USUAL_SIZES)
EXACT_VISION_AFTER = 32  # an exact graph saves 0.3 ms a batch and costs 30 ms once, while idle
EXACT_ONLY_AFTER = 3  # where the alternative is an eager run, 20 ms slower
EXACT_VISION_BYTES = 256 * 2**20  # exact graphs may add to the pool beyond the largest bucket's


@dataclass(slots=True)
class DeviceTicket:
    turn: int
    num_sampled: int
    ids: Tensor | None = None
    is_bad: Tensor | None = None
    scores: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    prompt_scores: list[list[tuple[Tensor, ...]]] = field(default_factory=list)
    sums: Tensor | None = None
    picked: Tensor | None = None
    pick_sizes: Sequence[int] = ()
    done: Any = None

    @property
    def is_done(self) -> bool:
        return self.done is None or bool(self.done.query())

    def wait(self) -> StepResult:
        if self.done is not None:
            self.done.synchronize()
        return StepResult(
            token_ids=self.ids.tolist() if self.ids is not None else [],
            is_bad=self.is_bad.tolist() if self.is_bad is not None else [],
            scores={row: _scores([parts]) for row, parts in self.scores.items()},
            prompt_scores=[_scores(parts) for parts in self.prompt_scores],
            sums=[] if self.sums is None else list(self.sums.numpy()),
            picked=[] if self.picked is None else [part.numpy() for part in self.picked.split(list(self.pick_sizes))],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorSettings(EncoderSettings):
    """`max_tokens` is the size of the largest step. A phase whose mode is None runs eagerly."""

    max_tokens: int
    modes: Mapping[str, Mode | None]
    strict: bool
    vision_tiers: frozenset[Tier] = frozenset({Tier.CAPACITY})  # where vision has graphs at all

    @property
    def vision_graphs(self) -> GraphSettings:
        return GraphSettings(
            tiers=self.vision_tiers if self.modes["vision"] else frozenset(),
            strict=self.strict,
            exact_after=EXACT_VISION_AFTER if Tier.CAPACITY in self.vision_tiers else EXACT_ONLY_AFTER,
            exact_max_graphs=EXACT_VISION_GRAPHS,
            exact_max_bytes=EXACT_VISION_BYTES,
        )


class Checks(Protocol):
    """Obeys orders that check graphs (`check_orders.py`)."""

    on_graph: Callable[[str, int, int], None]

    def obey(self, orders: GraphCheck) -> Any: ...


class DeviceExecutor:
    def __init__(self, state: DeviceState, settings: ExecutorSettings) -> None:
        self.state, self.settings = state, settings
        model = state.model
        self._model = model
        self._lane = lane_for(model.place.device)
        self._is_cuda = model.place.device.type == "cuda"
        prefill = prefill_phase(model, state, settings.max_tokens)
        trunk_TD = prefill.arena.views(prefill.arena.limits)["trunk"]
        self.prefill = self._graph_runner(prefill, "prefill")
        self.decode = self._graph_runner(decode_phase(model, state), "decode")
        self.head = self._graph_runner(head_phase(model, state, trunk_TD), "decode")
        self.sampler = self._graph_runner(sample_phase(state), "decode")
        self.encoder = Encoder(state, settings, settings.vision_graphs) if model.tower is not None else None
        self._logits = Logits(state, trunk_TD, num_turns=NUM_TICKETS)
        self._pooling = Pooling(state, trunk_TD)
        self._host_ids = [self._host(torch.int64) for _ in range(NUM_TICKETS)]
        self._host_bad = [self._host(torch.bool) for _ in range(NUM_TICKETS)]
        self._turn = 0
        self._ticket: DeviceTicket | None = None
        self._trace: list[GraphKey | str] = []
        self._timer: PassTimer | None = None  # while a trace is recorded
        self.checks: Checks | None = None

    def composer(self) -> Composer:
        spec, state = self._model.spec, self.state
        encoder = self.encoder
        layout = CacheLayout(
            block_size=state.block_size,
            max_blocks=state.max_blocks,
            page_rows=self.settings.page_rows,
            has_vision=encoder is not None,
            has_limits=spec.sees_whole_image,
        )
        vision = None if encoder is None else encoder.facts
        vocab_size, has_head = state.logits.shape[1], self._model.has_head
        return Composer(layout, self.catalogues, vocab_size=vocab_size, vision=vision, has_head=has_head)

    @property
    def device(self) -> torch.device:
        return self._model.place.device

    @property
    def catalogues(self) -> dict[str, Catalogue]:
        return {runner.phase.name: runner.catalogue for runner in self.phases}

    @property
    def vision(self) -> GraphRunner | None:
        return None if self.encoder is None else self.encoder.graphs

    @property
    def phases(self) -> tuple[GraphRunner, ...]:
        found = (self.vision, self.prefill, self.decode, self.head, self.sampler)
        return tuple(runner for runner in found if runner is not None)

    def capture(self, progress: Progress | None = None, *, largest_only: bool = False) -> None:
        """Captures every phase's graphs, largest first, or with `largest_only` just enough to measure their memory.
        Language graphs share one pool; vision graphs have their own."""
        if self._is_cuda:
            gc.collect()  # captures run with the collector off
        for runner in self.phases:
            runner.capture_buckets(progress, largest_only=largest_only)

    def execute(self, orders: Orders) -> Any:
        """Carries out any order. `scheduling.executing.Executor` documents what each returns."""
        match orders:
            case Run():
                return self.run(orders)
            case SampleTokens():
                self.sample(orders)
            case Encode() | EncodeMore():
                return self.encode(orders)
            case Begin():
                self._logits.begin(orders)
            case Capture():
                return self.capture_layout(orders.layout)
            case Drop():
                assert self.encoder is not None, "only images have layouts"
                self.encoder.graphs.drop(orders.keys)
            case Calibrate():
                self._calibrate(orders)
            case WarmUp():
                self.warm_up()
            case _:
                assert self.checks is not None, f"this executor was built without checks: {orders}"
                return self.checks.obey(orders)
        return None

    def _calibrate(self, orders: Calibrate) -> None:
        if orders.times_vision and self.encoder is not None:
            self.encoder.calibrate(orders.num_rounds)
        if orders.times_steps:
            self.prefill.time_replays()
            if self.encoder is not None:
                self.encoder.time_replays()

    def take_trace(self) -> str:
        """How the newest order's passes ran, including a failed one. Can be read once. Ranks must agree on it."""
        trace, self._trace = self._trace, []
        return "; ".join(map(str, trace))

    def time_passes(self) -> None:
        """Times every pass until `take_passes`; a second call starts over."""
        self._timer = PassTimer(self._model.place.device)

    def take_passes(self) -> tuple[list[TracedPass], int]:
        timer, self._timer = self._timer, None
        return ([], 0) if timer is None else timer.close()

    def encode(self, orders: Encode | EncodeMore) -> Encoded:
        assert self.encoder is not None, f"{self._model.spec.architecture} sees no images"
        encoded = self.encoder.encode(orders)
        if self._timer is not None and isinstance(encoded.lap, DeviceLap):
            decision = orders.vision.decision if isinstance(orders, Encode) else orders.decision
            self._timer.add(encoded.lap, "vision", decision, orders.step, self.encoder.graphs.last_rows)
        last = self.encoder.graphs.last
        self._trace = [f"{last}: {encoded.problem}" if encoded.problem else last]
        return encoded

    @torch.no_grad()
    def run(self, orders: Run) -> DeviceTicket:
        self._trace = []
        self._turn = (self._turn + 1) % NUM_TICKETS
        ticket = self._ticket = DeviceTicket(self._turn, orders.num_sampled)
        for one in orders.passes:
            self._run_pass(one, ticket, orders.step)
        ticket.prompt_scores = [self._logits.score_prompt(scored) for scored in orders.prompt_scores]
        if orders.pool is not None:
            ticket.sums = self._pooling.sum_rows(orders.pool)
        if orders.picks:
            ticket.picked = self._pooling.pick(orders.picks)
            ticket.pick_sizes = [len(one.token_ids) for one in orders.picks]
        self._mark(ticket)
        return ticket

    @torch.no_grad()
    def sample(self, orders: SampleTokens) -> None:
        """Samples and scores after the newest run, whose ticket gets the results."""
        ticket = self._ticket
        assert ticket is not None, "no run to sample from"
        self._trace = []
        if orders.sampler is not None:
            self._logits.edit(ticket.num_sampled, orders.edits, orders.mask, ticket.turn)
            self._run_pass(orders.sampler, ticket, orders.step)
        ticket.scores = self._logits.score(orders.scores)
        self._mark(ticket)

    def capture_layout(self, layout: ExactLayout) -> int:
        assert self.encoder is not None, "only images have layouts"
        return self.encoder.graphs.capture_layout(layout)

    def _run_pass(self, one: Pass, ticket: DeviceTicket, step: int) -> None:
        timer, device = self._timer, self._model.place.device
        begin = None if timer is None else now(device)
        runner = {"prefill": self.prefill, "decode": self.decode, "head": self.head, "sample": self.sampler}[one.phase]
        try:
            runner.obey(one.decision, one.values, lambda outputs: self._deliver(ticket, outputs))
        finally:
            self._trace.append(runner.last)
        if timer is not None:
            timer.add(DeviceLap(begin, now(device)), one.phase, one.decision, step, runner.last_rows)

    def _deliver(self, ticket: DeviceTicket, outputs: Mapping[str, Tensor]) -> None:
        count = ticket.num_sampled
        if "next_ids" in outputs:
            ticket.ids = self._host_ids[ticket.turn][:count]
            ticket.ids.copy_(outputs["next_ids"][:count], non_blocking=True)
        if "is_bad" in outputs:
            ticket.is_bad = self._host_bad[ticket.turn][:count]
            ticket.is_bad.copy_(outputs["is_bad"][:count], non_blocking=True)

    def _mark(self, ticket: DeviceTicket) -> None:
        if self._is_cuda:
            ticket.done = ticket.done or torch.cuda.Event()
            ticket.done.record()

    def snapshots(self) -> dict[str, dict[str, Any]]:
        return {runner.phase.name: runner.snapshot() for runner in self.phases}

    def warm_up(self) -> None:
        """Compiles kernels that run outside graphs: pixels to patches, and grammar masks."""
        if self.encoder is not None:
            self.encoder.warm_up()
        self._logits.warm_up()

    def reserve(self) -> int:
        """Keeps memory for passes that may run without a graph. Returns the bytes."""
        vision = 0 if self.encoder is None else self.encoder.reserve()
        return vision + (self._reserve_language() if self.settings.has_shadow and self._is_cuda else 0)

    @torch.no_grad()
    def _reserve_language(self) -> int:
        """Runs the largest pass of each phase, so that torch keeps its memory."""
        device = self._model.place.device
        before = torch.cuda.memory_reserved(device)
        for runner in (self.prefill, self.decode, self.head, self.sampler):
            batch = runner.example_for(runner.phase.buckets[-1])
            runner.eager({**batch.tensors, **batch.arrays}, lambda outputs: None, at=runner.phase.buckets[-1])
        return torch.cuda.memory_reserved(device) - before

    def require_device(self) -> None:
        """Call after an error. Some, such as an illegal memory access, make every later CUDA call fail."""
        if self._is_cuda:
            try:
                torch.cuda.synchronize(self._model.place.device)
            except Exception as error:
                raise EngineDeadError(f"the GPU cannot continue: {_first_line(error)}") from error

    def _graph_runner(self, phase: Phase, switch: str) -> GraphRunner:
        mode = self.settings.modes[switch]
        tiers = frozenset({Tier.CAPACITY}) if mode else frozenset[Tier]()
        # Only attention over the KV cache is called between pieces, and only these phases have it.
        mode = mode if phase.name in ("prefill", "decode") else Mode.FULL
        settings = GraphSettings(mode=mode or Mode.FULL, tiers=tiers, strict=self.settings.strict)
        if self.settings.has_few_buckets:
            phase = replace(phase, buckets=few_buckets(phase.buckets, phase.rows))
        return GraphRunner(phase, settings, self._lane)

    def _host(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self.state.max_sequences, dtype=dtype, pin_memory=self._is_cuda)


def _scores(parts: Sequence[tuple[Tensor, ...]]) -> Scores:
    if not parts:
        return Scores(*(np.zeros(0) for _ in range(4)))
    return Scores(*(torch.cat(columns).numpy() for columns in zip(*parts, strict=True)))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__

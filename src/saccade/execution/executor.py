"""The runner: plans to device work. The only code of the engine that launches anything.

A launch returns at once with a ticket; `Ticket.wait` is the one place where the host waits for the device. Later work
is queued behind it on the same stream, so nothing that a ticket still needs is overwritten before it is copied.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.config import GraphSettings, Mode, Tier
from saccade.errors import EngineDeadError
from saccade.execution.encoder import USUAL_SIZES, Encoder, EncoderSettings
from saccade.execution.language import decode_phase, head_phase, prefill_phase
from saccade.execution.sampler import (
    edit_logits,
    has_edits,
    has_penalties,
    masked_rows,
    needs_sampler,
    sample_phase,
    sample_values,
)
from saccade.execution.state import DeviceState
from saccade.graphs import GraphKey, GraphRunner, Phase, lane_for
from saccade.inputs.settings import ImageSettings, VideoSettings
from saccade.scheduling.arrays import (
    Ints,
    Layout,
    Running,
    decode_values,
    is_decode,
    last_rows,
    mixed_values,
    sequences,
)
from saccade.scheduling.buckets import few_buckets
from saccade.scheduling.matcher import Masks, Matcher
from saccade.scheduling.plan import Chunk, Plan
from saccade.wire.sampling_params import MAX_LOGPROBS
from saccade.wire.update import Scores

Progress = Callable[[int, int, GraphKey], None]
_TORCH_DTYPES = {"uint8": torch.uint8, "int32": torch.int32, "int64": torch.int64}
MAX_SCORED_ROWS = 256  # prompt rows whose logits exist at the same time
NUM_TICKETS = 3  # two plans may be in flight
EXACT_VISION_GRAPHS = len(USUAL_SIZES)
EXACT_VISION_AFTER = 32  # a graph of its own saves 0.3 ms a batch and costs 30 once, when nobody waits
EXACT_ONLY_AFTER = 3  # where the other way is without a graph, and 20 ms longer
EXACT_VISION_BYTES = 256 * 2**20  # what exact vision graphs may add to the pool that the largest bucket made


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step gave. A request in `bad` got logits that are no numbers, one in `failed` images that could not be
    encoded."""

    tokens: Mapping[str, int]
    bad: frozenset[str]
    scores: Mapping[str, Scores]
    prompt_scores: Mapping[str, Scores]
    failed: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Ticket:
    """A step on its way."""

    plan: Plan
    sampled: Sequence[Chunk] = ()
    ids: Tensor | None = None
    is_bad: Tensor | None = None
    scores: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    prompt_scores: dict[str, list[tuple[Tensor, ...]]] = field(default_factory=dict)
    matchers: dict[str, Matcher] = field(default_factory=dict)  # of the sampled requests that follow a grammar
    failed: Mapping[str, str] = field(default_factory=dict)  # what went wrong with images, by request
    done: Any = None

    def wait(self) -> StepOutput:
        if self.done is not None:
            self.done.synchronize()
        names = [chunk.request_id for chunk in self.sampled]
        ids = self.ids.tolist() if self.ids is not None else []
        is_bad = self.is_bad.tolist() if self.is_bad is not None else []
        return StepOutput(
            tokens=dict(zip(names, ids, strict=True)),
            bad=frozenset(name for name, bad in zip(names, is_bad, strict=True) if bad),
            scores={name: _scores([parts]) for name, parts in self.scores.items()},
            prompt_scores={name: _scores(parts) for name, parts in self.prompt_scores.items()},
            failed=self.failed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSettings:
    """Largest step, pixels of images and videos, and the graphs of each phase (None: eager)."""

    max_tokens: int
    max_units: int
    page_rows: int
    images: ImageSettings | None
    videos: VideoSettings | None
    modes: Mapping[str, Mode | None]
    strict: bool
    vision_tiers: frozenset[Tier] = frozenset({Tier.CAPACITY})  # where vision has graphs at all
    has_few_buckets: bool = False  # as on a CPU, where graphs save no time
    has_shadow: bool = False  # any pass may be run again without its graph

    @property
    def encoder(self) -> EncoderSettings:
        return EncoderSettings(
            max_units=self.max_units,
            page_rows=self.page_rows,
            images=self.images,
            videos=self.videos,
            has_few_buckets=self.has_few_buckets,
            has_shadow=self.has_shadow,
            graphs=GraphSettings(
                tiers=self.vision_tiers if self.modes["vision"] else frozenset(),
                strict=self.strict,
                exact_after=EXACT_VISION_AFTER if Tier.CAPACITY in self.vision_tiers else EXACT_ONLY_AFTER,
                exact_max_graphs=EXACT_VISION_GRAPHS,
                exact_max_bytes=EXACT_VISION_BYTES,
            ),
        )


class Runner:
    def __init__(self, state: DeviceState, settings: RunnerSettings) -> None:
        self.state, self.settings = state, settings
        model = state.model
        self._model = model
        self._lane = lane_for(model.place.device)
        self._is_cuda = model.place.device.type == "cuda"
        prefill = prefill_phase(model, state, settings.max_tokens)
        self._trunk_TD = prefill.arena.views(prefill.arena.limits)["trunk"]
        self.prefill = self._graph_runner(prefill, "prefill")
        self.decode = self._graph_runner(decode_phase(model, state), "decode")
        self.head = self._graph_runner(head_phase(model, state, self._trunk_TD), "decode")
        self.sample = self._graph_runner(sample_phase(state), "decode")
        self.encoder = Encoder(state, settings.encoder) if model.tower is not None else None
        media = model.spec.media
        self.layout = Layout(
            block_size=state.block_size,
            max_blocks=state.max_blocks,
            page_rows=settings.page_rows,
            has_vision=model.tower is not None,
            has_limits=media is not None and media.sees_whole_image,
        )
        self._host_ids = [self._host(torch.int64) for _ in range(NUM_TICKETS)]
        self._host_bad = [self._host(torch.bool) for _ in range(NUM_TICKETS)]
        self._masks = Masks(state.max_sequences, state.logits.shape[1], model.place.device, num_turns=NUM_TICKETS)
        self._turn = 0

    @property
    def vision(self) -> GraphRunner | None:
        return None if self.encoder is None else self.encoder.graphs

    @property
    def phases(self) -> tuple[GraphRunner, ...]:
        found = (self.vision, self.prefill, self.decode, self.head, self.sample)
        return tuple(runner for runner in found if runner is not None)

    def capture(self, progress: Progress | None = None, *, largest_only: bool = False) -> None:
        """Capture every phase's graphs, each largest first; `largest_only` to measure what they need. Language passes
        share one pool; vision passes, which run beside them, have their own."""
        gc.collect()  # once: captures run with the collector off
        for runner in self.phases:
            runner.capture_buckets(progress, largest_only=largest_only)

    def launch(self, plan: Plan, running: Mapping[str, Running]) -> Ticket:
        try:
            return self._launch(plan, running)
        except BaseException:
            if self.encoder is not None:
                self.encoder.beside.join()  # what was launched of this plan is committed before it is over
            raise

    @torch.no_grad()
    def _launch(self, plan: Plan, running: Mapping[str, Running]) -> Ticket:
        ticket = Ticket(plan)
        self._turn = (self._turn + 1) % NUM_TICKETS
        if plan.encode:
            assert self.encoder is not None, f"{self._model.spec.architecture} sees no images"
            ticket.failed = self.encoder.encode(plan.encode, running)
            self.encoder.beside.wait()
        if is_decode(plan.chunks, running):
            ticket.sampled = plan.chunks
            self.decode.run(decode_values(plan.chunks, running, self.layout), lambda o: self._deliver(ticket, o))
        else:
            self._run_mixed(plan.chunks, running, ticket)
        self._sample(ticket, running)
        self._score(ticket, running)
        if self._is_cuda:
            ticket.done = torch.cuda.Event()
            ticket.done.record()
        return ticket

    def warm_up_pixels(self) -> None:
        """Compile what turns pixels into patches; it runs before the vision graph, not inside it."""
        if self.encoder is not None:
            self.encoder.warm_up()

    def reserve(self) -> int:
        """Keep memory for passes that may run without a graph; how many bytes."""
        vision = 0 if self.encoder is None else self.encoder.reserve()
        return vision + (self._reserve_language() if self.settings.has_shadow and self._is_cuda else 0)

    @torch.no_grad()
    def _reserve_language(self) -> int:
        """Run the largest pass of each phase, so that torch keeps the memory it needs."""
        device = self._model.place.device
        before = torch.cuda.memory_reserved(device)
        for runner in (self.prefill, self.decode, self.head, self.sample):
            batch = runner.example_for(runner.phase.buckets[-1])
            runner.eager({**batch.tensors, **batch.arrays}, lambda outputs: None, at=runner.phase.buckets[-1])
        return torch.cuda.memory_reserved(device) - before

    def calibrate(self) -> None:
        """Measure what there is to choose between, and capture what is likely to be chosen."""
        if self.encoder is not None:
            self.encoder.calibrate()
            self.encoder.capture_usual()

    def require_device(self) -> None:
        """After an error: some, such as an access beyond memory, leave a GPU on which every later call fails."""
        if self._is_cuda:
            try:
                torch.cuda.synchronize(self._model.place.device)
            except Exception as error:
                raise EngineDeadError(f"the GPU does not go on: {_first_line(error)}") from error

    @property
    def can_improve(self) -> bool:
        """Whether there is something to do in an idle moment."""
        return self.encoder is not None and self.encoder.has_hot

    def improve(self) -> None:
        """Do some of it: capture a layout of images that came often."""
        if self.encoder is not None and self.encoder.has_hot:
            self.encoder.capture_hot()

    def warm_up_masks(self) -> None:
        """Compile what grammars use before the sampler's graph."""
        self._masks.warm_up(self.state.edited, self.state.sampling)

    def prepare(self, owner: Running) -> None:
        """Prepare a sequence for its next request: what penalties count is that request's prompt and outputs."""
        if not has_penalties(owner.request.params):
            return
        sampling, seen = self.state.sampling, self.state.seen
        sampling.forget(seen, self._device(np.asarray([owner.sequence])))
        for ids, note in (
            (owner.prompt.token_ids, sampling.mark_prompt),
            (owner.request.output_ids, sampling.count_tokens),
        ):
            if len(ids):
                sequence = self._device(np.full(len(ids), owner.sequence))
                note(seen, sequence, self._device(np.asarray(ids, dtype=np.int64)), torch.ones_like(sequence) > 0)

    def _run_mixed(self, chunks: Sequence[Chunk], running: Mapping[str, Running], ticket: Ticket) -> None:
        self.prefill.run(mixed_values(chunks, running, self.layout), lambda outputs: None)
        row = 0
        for chunk in chunks:
            if chunk.wants_all_logits:
                ticket.prompt_scores[chunk.request_id] = self._score_prompt(chunk, running[chunk.request_id], row)
            row += chunk.count
        sampled, rows = last_rows(chunks)
        ticket.sampled = sampled
        if sampled:
            values = {"rows": rows, "sequences": sequences(sampled, running)}
            self.head.run(values, lambda outputs: self._deliver(ticket, outputs))

    def _deliver(self, ticket: Ticket, outputs: Mapping[str, Tensor]) -> None:
        """Queue the copies of tokens, and of what is wrong with them, to the host."""
        count = len(ticket.sampled)
        ticket.ids = self._host_ids[self._turn][:count]
        ticket.ids.copy_(outputs["next_ids"], non_blocking=True)
        if "is_bad" in outputs:
            ticket.is_bad = self._host_bad[self._turn][:count]
            ticket.is_bad.copy_(outputs["is_bad"], non_blocking=True)

    def _sample(self, ticket: Ticket, running: Mapping[str, Running]) -> None:
        params = [running[chunk.request_id].request.params for chunk in ticket.sampled]
        if not any(needs_sampler(p) for p in params):
            return
        count = len(ticket.sampled)
        self.state.edited[:count].copy_(self.state.logits[:count])
        if any(has_edits(p) for p in params):
            edit_logits(self.state, ticket.sampled, running)
        if rows := masked_rows(ticket.sampled, running):
            self._masks.apply(self.state.edited[:count], rows, self.state.sampling, self._turn)
            ticket.matchers = {ticket.sampled[item.row].request_id: item.matcher for item in rows}
        self.sample.run(sample_values(ticket.sampled, running), lambda outputs: self._deliver(ticket, outputs))

    def _score(self, ticket: Ticket, running: Mapping[str, Running]) -> None:
        """Log-probabilities of the sampled tokens, from the raw logits, for those who asked."""
        for row, chunk in enumerate(ticket.sampled):
            owner = running[chunk.request_id]
            wanted = owner.request.params.logprobs
            if wanted is None:
                continue
            newest = self.state.newest_ids[owner.sequence : owner.sequence + 1]
            ticket.scores[chunk.request_id] = self._scores(self.state.logits[row : row + 1], newest, wanted)

    def _score_prompt(self, chunk: Chunk, owner: Running, row: int) -> list[tuple[Tensor, ...]]:
        """Log-probabilities of the prompt tokens that follow the chunk's rows, from the first that is wanted on."""
        first = max(chunk.start, owner.request.first_scored_row)
        row += first - chunk.start
        next_ids = owner.prompt.token_ids[first + 1 : min(chunk.end + 1, len(owner.prompt))]
        k = owner.request.params.prompt_logprobs or 0
        parts = []
        for start in range(0, len(next_ids), MAX_SCORED_ROWS):
            ids = np.asarray(next_ids[start : start + MAX_SCORED_ROWS], dtype=np.int64)
            hidden_ND = self._model.finish(self._trunk_TD[row + start : row + start + len(ids)])
            logits = self._model.logits(hidden_ND)
            parts.append(self._scores(logits, self._device(ids), k))
        return parts

    def _scores(self, logits_NV: Tensor, ids_N: Tensor, k: int) -> tuple[Tensor, ...]:
        """On a GPU always the most that anybody may ask for, cut on the way: one kernel, compiled before the first
        request."""
        most = min(MAX_LOGPROBS, logits_NV.shape[1]) if self._is_cuda else k
        chosen, ranks, top_ids, top_logprobs = self.state.sampling.logprobs(logits_NV, ids_N, most)
        return tuple(self._to_host(part) for part in (chosen, ranks, top_ids[:, :k], top_logprobs[:, :k]))

    def _graph_runner(self, phase: Phase, switch: str) -> GraphRunner:
        mode = self.settings.modes[switch]
        tiers = frozenset({Tier.CAPACITY}) if mode else frozenset[Tier]()
        # Only attention over the KV cache is ever called between pieces: the other phases have none.
        mode = mode if phase.name in ("prefill", "decode") else Mode.FULL
        settings = GraphSettings(mode=mode or Mode.FULL, tiers=tiers, strict=self.settings.strict)
        if self.settings.has_few_buckets:
            phase = replace(phase, buckets=few_buckets(phase.buckets, phase.rows))
        return GraphRunner(phase, settings, self._lane)

    def _host(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self.state.max_sequences, dtype=dtype, pin_memory=self._is_cuda)

    def _device(self, array: Ints) -> Tensor:
        if not self._is_cuda:
            return torch.from_numpy(np.array(array))  # pixels are read-only, which torch has no notion of
        pinned = torch.empty(array.shape, dtype=_TORCH_DTYPES[array.dtype.name], pin_memory=True)
        pinned.numpy()[...] = array
        return pinned.to(self._model.place.device, non_blocking=True)

    def _to_host(self, tensor: Tensor) -> Tensor:
        if not self._is_cuda:
            return tensor.clone()
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _scores(parts: Sequence[tuple[Tensor, ...]]) -> Scores:
    return (
        Scores(*(torch.cat([part[i] for part in parts]).numpy() for i in range(4))) if parts else Scores([], [], [], [])
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__

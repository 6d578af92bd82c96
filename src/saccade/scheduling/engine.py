"""The engine: requests in, tokens out. One thread owns it; planning one step ahead keeps the device busy."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from random import Random
from time import monotonic
from typing import Any

from llguidance import LLMatcher
from msgspec.structs import replace

from saccade.choice.exact import ExactLayout
from saccade.errors import EngineDeadError, RequestError
from saccade.inputs.placeholders import Prompt
from saccade.scheduling import executing
from saccade.scheduling.arrays import LiveRequest, begin
from saccade.scheduling.compose import Composer
from saccade.scheduling.executing import Encoded, Executor, ShadowChecks, StepResult, Ticket, WrongReplay
from saccade.scheduling.matcher import GrammarCompiler, Matcher
from saccade.scheduling.orders import Calibrate, Capture, Drop
from saccade.scheduling.pace import Pace
from saccade.scheduling.pass_log import PassEntry, PassLog
from saccade.scheduling.pooling import Pooled, finished_vector
from saccade.scheduling.request import Request, Status
from saccade.scheduling.request_checks import PixelAccount, check_frames, check_head, check_tokens, spans_of
from saccade.scheduling.scheduler import Scheduler
from saccade.scheduling.step_plan import Chunk, RowError, StepPlan
from saccade.scheduling.trace_log import TraceLog
from saccade.wire.engine_metrics import JobStats, StepTokens
from saccade.wire.grammar import Grammar
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.trace import EngineTrace
from saccade.wire.turn import NEXT, Turn
from saccade.wire.update import NO_NUMBERS, FinishReason, PromptScores, Scores, Update

NO_SCORES: Mapping[str, Scores] = {}


@dataclass(slots=True, kw_only=True)
class _Flight:
    """A step in flight; `problem` says why not all of it was launched."""

    plan: StepPlan
    ticket: Ticket | None = None
    sampled: Sequence[Chunk] = ()
    matchers: Mapping[str, Matcher] = field(default_factory=dict)  # of sampled requests with a grammar
    failed: Mapping[str, str] = field(default_factory=dict)  # image errors by request
    pooled: Pooled = field(default_factory=Pooled)
    problem: str = ""
    passes: PassEntry | None = None


class Engine:
    """Schedules, composes, executes. Every request that `add` accepts ends in exactly one update with a finish."""

    def __init__(
        self,
        executor: Executor,
        composer: Composer,
        scheduler: Scheduler,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        seed: int = 0,
        clock: Callable[[], float] = monotonic,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.executor, self.composer, self.scheduler = executor, composer, scheduler
        self._eos_token_ids = eos_token_ids
        self._grammars, self._clock = grammars, clock
        self._seeds = Random(seed)
        self._pixels = PixelAccount()
        self._live: dict[str, LiveRequest] = {}
        self._free_sequences = list(range(scheduler.settings.max_num_seqs, 0, -1))
        self._in_flight: deque[_Flight] = deque()
        self._dead: EngineDeadError | None = None
        self.passes = PassLog(composer.catalogues, clock)
        self.shadow: ShadowChecks | None = None
        self.step_tokens = StepTokens()
        self._trace: TraceLog | None = None  # while somebody looks

    @property
    def has_work(self) -> bool:
        return not self.scheduler.is_idle

    def add(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        turn: Turn = NEXT,
        deadline: float | None = None,
        cache_salt: str | None = None,
        compiled: LLMatcher | None = None,
    ) -> tuple[str, ...]:
        """Accept a request and return the ids of its n outputs. Refuses with a RequestError or a CapacityError.
        `compiled` is its precompiled grammar; without it this waits for the compiler."""
        check_head(params, has_head=self.composer.has_head)
        check_tokens(prompt, params, self.composer.vocab_size, self._eos_token_ids)
        if self.composer.vision is not None:
            check_frames(prompt, self.composer.vision.catalogue)
        self._pixels.check(prompt, self.scheduler.settings)
        if params.grammar is not None and compiled is None:
            compiled = self.compile(params.grammar).result()
        request = Request(
            id=request_id,
            prompt_ids=tuple(prompt.token_ids.tolist()),
            params=params,
            spans=spans_of(prompt, is_whole=self.composer.layout.has_limits),
            eos_token_ids=self._eos_token_ids,
            arrival=self._clock(),
            priority=turn.priority,
            tenant=turn.tenant,
            weight=turn.weight,
            deadline=deadline,
            cache_salt=cache_salt,
            output_shift=prompt.output_shift,
        )
        ids = self.scheduler.add(request)
        self._pixels.count(prompt, len(ids))
        for member_id in ids:
            self._live[member_id] = LiveRequest(self.scheduler.live[member_id], prompt, compiled=compiled)
            if params.reports_passes:
                self.passes.count_for(member_id)
        return ids

    def compile(self, grammar: Grammar) -> Future[LLMatcher]:
        """Compile a grammar ahead, so that `add` need not wait. The future may hold a RequestError."""
        if self._grammars is None:
            raise RequestError("this engine has no vocabulary to follow a grammar with", param="response_format")
        return self._grammars.compile(grammar)

    def forget_grammar(self, grammar: Grammar, compiled: Future[LLMatcher]) -> None:
        """Nobody waits for this result of `compile` any more."""
        if self._grammars is not None:
            self._grammars.forget(grammar, compiled)

    @property
    def grammar_jobs(self) -> JobStats:
        return JobStats() if self._grammars is None else self._grammars.jobs

    def close(self) -> None:
        """Ends processes that belong to the engine."""
        if self._grammars is not None:
            self._grammars.close()

    @property
    def can_improve(self) -> bool:
        """Whether there is something to do in an idle moment."""
        vision = self.composer.vision
        return vision is not None and vision.catalogue.exact.has_pending

    def improve(self) -> Exception | None:
        """Capture one frequent image layout. Returns the error if that fails; requests run without it."""
        vision = self.composer.vision
        try:
            if vision is not None and (layout := vision.catalogue.exact.next_pending()) is not None:
                self.capture(layout)
        except Exception as error:
            self.executor.require_device()
            return error
        return None

    def capture_usual(self) -> None:
        if self.composer.vision is not None:
            for layout in self.composer.vision.usual_layouts():
                self.capture(layout)

    def capture(self, layout: ExactLayout) -> None:
        """Capture a vision graph of one layout, and drop graphs that no longer fit."""
        assert self.composer.vision is not None, "only images have layouts"
        nbytes = self.executor.execute(Capture(layout))
        if dropped := self.composer.vision.catalogue.exact.add(layout.key, nbytes):
            self.executor.execute(Drop(dropped))

    @property
    def can_check(self) -> bool:
        """Whether there is a replay to check, and time for it."""
        return self.shadow is not None and self.shadow.has_records and not self.has_work and not self._in_flight

    def check_shadow(self, should_stop: Callable[[], bool] = lambda: False) -> WrongReplay | Exception | None:
        """Check one replay in an idle moment. Returns what was wrong with it or with the check. What a wrong graph
        wrote is dropped from the caches."""
        assert self.shadow is not None and self.can_check, "requests run; a check writes where they read"
        found = self.shadow.check(should_stop)
        if isinstance(found, Exception):
            self.executor.require_device()
        elif found is not None:
            self.scheduler.forget_cached()
        return found

    def phase_snapshots(self) -> dict[str, dict[str, Any]]:
        found = self.executor.snapshots()
        for name, phase in found.items():
            phase["shadow"] = {} if self.shadow is None else self.shadow.counts(name)
        return found

    def begin_trace(self) -> None:
        """Record passes and requests until `end_trace`, beginning anew if they are recorded already."""
        self._trace = TraceLog(self._clock())
        self.executor.time_passes()

    def end_trace(self) -> EngineTrace | None:
        """What was recorded; None if nothing was."""
        trace, self._trace = self._trace, None
        passes = self.executor.take_passes()
        return None if trace is None else trace.close(self._clock(), self._live.values(), *passes)

    def abort(self, request_id: str) -> list[Update]:
        """End a request now; it gets no further updates."""
        return self._told(self.scheduler.abort(request_id))

    def stop(self, request_id: str, stop: str) -> list[Update]:
        return self._told(self.scheduler.stop(request_id, stop))

    def calibrate(self, orders: Calibrate) -> None:
        """Time passes, from which graphs are chosen and steps are kept short."""
        self.executor.execute(orders)
        max_step_s = self.scheduler.settings.max_step_ms / 1e3
        if max_step_s:
            vision = None if self.composer.vision is None else self.composer.vision.catalogue.costs
            prefill = self.composer.catalogues["prefill"].seconds
            self.scheduler.pace = Pace(max_step_s, prefill, None if vision is None else vision.graph)

    def step(self) -> list[Update]:
        """Launch the next step, then take in the one that ran meanwhile. Once the executor is gone, always raises."""
        if self._dead is not None:
            raise type(self._dead)(str(self._dead))
        updates: list[Update] = []
        try:
            while len(self._in_flight) > 1:  # the last call was interrupted
                updates += self._take_in()
            plan = self.scheduler.plan(self._clock())
            updates += self._told(plan.updates)
            for request_id in plan.preempted:
                self._release(self._live[request_id])
            if plan.chunks:
                self._launch(plan)
            if self._in_flight and (not plan.chunks or len(self._in_flight) > 1):
                updates += self._take_in()
        except EngineDeadError as error:
            self._dead = error
            raise
        if self._trace is not None:
            self._trace.note_load(self._clock(), self.scheduler.stats())
        if self.scheduler.is_idle:
            self.scheduler.check()
        return updates

    def _launch(self, plan: StepPlan) -> None:
        """Compose and execute piece by piece: the device works on each while the host composes the next."""
        flight = _Flight(plan=plan)
        self._in_flight.append(flight)  # whatever happens, the plan is accounted for
        try:
            for chunk in plan.chunks:
                if not self._live[chunk.request_id].sequence:
                    self._begin(self._live[chunk.request_id])
            flight.failed = self._encode(plan) if plan.encode else {}
            orders, flight.sampled = self.composer.run(plan, self._live)
            flight.pooled = Pooled.of(plan.chunks, self._live)
            names = [chunk.request_id for chunk in plan.chunks]
            flight.passes = self.passes.language(orders.passes, names, self._clock())
            flight.ticket = self.executor.execute(orders)
            sample, flight.matchers = self.composer.sample(plan.step, flight.sampled, self._live)
            if sample is not None:
                self.executor.execute(sample)
                if sample.sampler is not None:
                    self.passes.follow(flight.passes, sample.sampler, [chunk.request_id for chunk in flight.sampled])
            if flight.ticket.is_done:  # as always on a CPU
                self.passes.end(flight.passes)
        except Exception as error:  # one bad step must not fail the others
            flight.problem = executing.problem(error, executing.STEP_FAILED)
            self.executor.require_device()
        except BaseException:  # interrupted
            flight.problem = executing.STEP_FAILED
            raise

    def _begin(self, live: LiveRequest) -> None:
        request = live.request
        if live.started is None:
            live.started = self._clock()
        live.seed = self._seeds.getrandbits(63) if request.params.seed is None else request.params.seed
        live.pooled = None  # a preempted request computes all rows again
        live.matcher = None if live.compiled is None else Matcher(live.compiled, request.output_ids)
        live.sequence = self._free_sequences.pop()
        if (orders := begin(live, self.composer.vocab_size)) is not None:
            self.executor.execute(orders)

    def _encode(self, plan: StepPlan) -> dict[str, str]:
        """Encode a plan's images. If a pass fails, its parts are run alone to find the culprit. Returns the errors by
        the request that an item is encoded for; other requests are unaffected."""
        vision = self.composer.vision
        assert vision is not None, "this model sees no images"
        media = [self._live[item.request_id].prompt.media[item.media_idx] for item in plan.encode]
        failed: dict[str, str] = {}
        waiting = vision.shares(media)
        while waiting:
            shares = waiting.pop(0)
            parts = [part for share in shares for part in share]
            try:
                orders = vision.encode(plan.step, shares, plan.encode, media)
            except Exception as error:
                encoded = Encoded(executing.problem(error, executing.ENCODE_FAILED))
            else:
                start = self._clock()
                encoded = self.executor.execute(orders)
            if encoded.lap is not None:  # requests that share a pass share its time
                names = {plan.encode[part.item].request_id for part in parts}
                self.passes.vision(orders.vision, names, start, encoded.lap)
                for request_id in names:
                    self._live[request_id].laps.append(encoded.lap)
            if encoded.problem is not None and len(parts) > 1:
                waiting[:0] = [[[part], *([] for _ in shares[1:])] for part in parts]
            elif encoded.problem is not None:
                failed[plan.encode[parts[0].item].request_id] = encoded.problem
        return failed

    def _take_in(self) -> list[Update]:
        """Results of the oldest step. Even a failed step is waited for: until its passes end, they read pages and
        blocks that the next plans may reassign."""
        flight, result = self._in_flight[0], None
        try:
            result = None if flight.ticket is None else flight.ticket.wait()
        except Exception as error:
            self.executor.require_device()
            flight.problem = executing.problem(error, executing.STEP_FAILED)
        self._in_flight.popleft()
        if flight.passes is not None:
            self.passes.end(flight.passes)
        if result is None or flight.problem:
            failed = {chunk.request_id: RowError(flight.problem) for chunk in flight.plan.chunks}
            updates = self._told(self.scheduler.commit(flight.plan, failed))
        else:
            self.step_tokens.note(sum(chunk.count for chunk in flight.plan.chunks))
            updates = self._prompt_updates(flight.plan, result)
            news = self.scheduler.commit(flight.plan, _results(flight, result) | flight.pooled.add(result))
            updates += self._told(news, {flight.sampled[row].request_id: one for row, one in result.scores.items()})
            for update in news:
                matcher = flight.matchers.get(update.request_id)
                if matcher is not None and update.finish is None and matcher.is_complete:
                    # The grammar allows nothing more, so no further pass is needed.
                    updates += self._told(self.scheduler.stop(update.request_id, None))
        if flight.plan.encode:
            for live in self._live.values():
                if live.request.status is not Status.RUNNING:  # preempted: it read rows of a failed image
                    self._release(live)
        return updates

    def _prompt_updates(self, plan: StepPlan, result: StepResult) -> list[Update]:
        scored = [chunk for chunk in plan.chunks if chunk.wants_all_logits]
        return [
            Update(name, prompt_scores=PromptScores(1 + max(chunk.start, live.request.first_scored_row), scores))
            for chunk, scores in zip(scored, result.prompt_scores, strict=True)
            if (live := self._live.get(name := chunk.request_id)) is not None
        ]

    def _told(self, updates: Iterable[Update], scores: Mapping[str, Scores] = NO_SCORES) -> list[Update]:
        """The scheduler's updates, with scores of their tokens, and with timings at the end."""
        told = []
        for update in updates:
            name, timings, passes, pooled = update.request_id, None, None, None
            live = self._live[name]
            if update.token_ids and live.first_token is None:
                live.first_token = self._clock()
            if update.finish is not None:
                timings, passes = live.timings(self._clock()), self.passes.taken(name)
                pooled = finished_vector(live) if update.finish.reason is FinishReason.LENGTH else None
                if self._trace is not None:
                    self._trace.note_end(live, self._clock(), update.finish.reason)
                self._release(live)
                self._pixels.count(live.prompt, -1)
                del self._live[name]
            found = scores.get(name) if update.token_ids else None
            told.append(replace(update, scores=found, timings=timings, passes=passes, pooled=pooled))
        return told

    def _release(self, live: LiveRequest) -> None:
        """Free a sequence. Steps in flight may still write its newest token, but its next owner writes later."""
        if live.sequence:
            self._free_sequences.append(live.sequence)
            live.sequence = 0


def _results(flight: _Flight, result: StepResult) -> dict[str, Sequence[int] | RowError]:
    """A token or an error for each request. Advances matchers by the sampled tokens."""
    tokens = {chunk.request_id: token for chunk, token in zip(flight.sampled, result.token_ids, strict=True)}
    for name, matcher in flight.matchers.items():
        matcher.take(tokens[name])
    errors = {name: matcher.error for name, matcher in flight.matchers.items() if matcher.error is not None}
    errors |= {c.request_id: NO_NUMBERS for c, bad in zip(flight.sampled, result.is_bad, strict=True) if bad}
    errors |= flight.failed
    return {
        **{name: (token,) for name, token in tokens.items() if name not in errors},
        **{name: RowError(message) for name, message in errors.items()},
    }

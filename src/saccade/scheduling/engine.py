"""The engine: requests in, tokens out. One thread owns it. It plans one step ahead to keep the device busy."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from random import Random
from time import monotonic
from typing import Any

from llguidance import LLMatcher
from msgspec.structs import replace

from saccade.errors import EngineDeadError, RequestError
from saccade.inputs.placeholders import Prompt
from saccade.scheduling import executing
from saccade.scheduling.arrays import LiveRequest, begin
from saccade.scheduling.compose import Composer
from saccade.scheduling.executing import Executor, StepResult
from saccade.scheduling.flight import Flight, finished_vector
from saccade.scheduling.idle_work import IdleWork
from saccade.scheduling.matcher import GrammarCompiler, Matcher
from saccade.scheduling.media_encoder import MediaEncoder
from saccade.scheduling.orders import Calibrate
from saccade.scheduling.pace import Pace
from saccade.scheduling.pass_log import PassLog
from saccade.scheduling.request import Request, Status
from saccade.scheduling.request_checks import (
    PixelAccount,
    check_frames,
    check_head,
    check_tokens,
    output_shift,
    spans_of,
)
from saccade.scheduling.scheduler import Scheduler
from saccade.scheduling.step_plan import RowError, StepPlan
from saccade.scheduling.trace_log import TraceLog
from saccade.wire.engine_metrics import new_step_tokens
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.trace_records import EngineTrace
from saccade.wire.turn import NEXT, Turn
from saccade.wire.update import FinishReason, PromptScores, Scores, Update

LISTEN_S = 1.0  # how long commands are taken while a step runs; steps take a fraction of this
NO_SCORES: Mapping[str, Scores] = {}


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
        self.grammars, self._clock = grammars, clock
        self._seeds = Random(seed)
        self._pixels = PixelAccount()
        self._live: dict[str, LiveRequest] = {}
        self._free_sequences = list(range(scheduler.settings.max_num_seqs, 0, -1))
        self._in_flight: deque[Flight] = deque()
        self._dead: EngineDeadError | None = None
        self._trace: TraceLog | None = None  # while a trace is recorded
        self.passes = PassLog(composer.catalogues, clock)
        self.step_tokens = new_step_tokens()
        self.idle = IdleWork(executor, composer, scheduler, lambda: not self.has_work and not self._in_flight)
        self._encoder = MediaEncoder(executor, composer, self.passes, clock)

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
        """Accepts a request and returns the ids of its n outputs, or raises a RequestError or CapacityError. `compiled`
        is its compiled grammar; without it this call waits for the compiler."""
        check_head(params, has_head=self.composer.has_head)
        check_tokens(prompt, params, self.composer.vocab_size, self._eos_token_ids)
        if self.composer.vision is not None:
            check_frames(prompt, self.composer.vision.catalogue)
        self._pixels.check(prompt, self.scheduler.settings)
        if params.grammar is not None and compiled is None:
            if self.grammars is None:
                raise RequestError("this engine has no vocabulary, which grammars need", param="response_format")
            compiled = self.grammars.compile(params.grammar).result()
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
            output_shift=output_shift(prompt),
        )
        ids = self.scheduler.add(request)
        self._pixels.count(prompt, len(ids))
        for member_id in ids:
            self._live[member_id] = LiveRequest(self.scheduler.live[member_id], prompt, compiled=compiled)
            if params.reports_passes:
                self.passes.count_for(member_id)
        return ids

    def phase_snapshots(self) -> dict[str, dict[str, Any]]:
        found = self.executor.snapshots()
        for name, phase in found.items():
            phase["shadow"] = self.idle.shadow_counts(name)
        return found

    def begin_trace(self) -> None:
        """Starts over if a trace is being recorded already."""
        self._trace = TraceLog(self.executor, self._live, self._clock)

    def end_trace(self) -> EngineTrace | None:
        """None if no trace was being recorded."""
        trace, self._trace = self._trace, None
        return None if trace is None else trace.end()

    def abort(self, request_id: str) -> list[Update]:
        """Ends a request now. It gets no further updates."""
        return self._complete(self.scheduler.abort(request_id))

    def stop(self, request_id: str, stop: str) -> list[Update]:
        return self._complete(self.scheduler.stop(request_id, stop))

    def calibrate(self, orders: Calibrate) -> None:
        """Measures pass times, which decide between graphs and set the pace of steps."""
        self.executor.execute(orders)
        prefill, vision = self.composer.catalogues["prefill"], self.composer.catalogues.get("vision")
        if orders.times_steps and prefill.seconds is not None:
            self.scheduler.pace = Pace(
                prefill.seconds,
                None if vision is None else vision.seconds,
                self.scheduler.settings.max_step_ms / 1e3,
                tuple((bucket["tokens"], bucket["requests"]) for bucket in prefill.shape.ordered),
                num_parts=self._num_parts,
            )

    def _num_parts(self, num_rows: int) -> int:
        """How many parts the vision pass of an image has. Images of passes that were not timed are not divided."""
        vision = self.composer.vision
        return 1 if vision is None or vision.catalogue.seconds is None else vision.facts.num_parts(num_rows)

    def step(self, take_commands: Callable[[], bool] | None = None) -> list[Update]:
        """Launches the next step, then collects the one that ran meanwhile. Once the executor is gone, always raises.
        `take_commands` is called while the device works. It may add, stop and abort requests, and returns True if a
        request it added should be launched behind the only running step instead of waiting for its end."""
        if self._dead is not None:
            raise type(self._dead)(str(self._dead))
        updates: list[Update] = []
        try:
            while len(self._in_flight) > 1:  # the previous call was interrupted
                updates += self._collect()
            plan = self.scheduler.plan(self._clock())
            updates += self._complete(plan.updates)
            for request_id in plan.preempted:
                self._release(self._live[request_id])
            if plan.chunks:
                self._launch(plan)
            must_wait = bool(self._in_flight) and (not plan.chunks or len(self._in_flight) > 1)
            if must_wait and self._should_collect(take_commands):
                updates += self._collect()
        except EngineDeadError as error:
            self._dead = error
            raise
        if self._trace is not None:
            self._trace.note_load(self.scheduler)
        return updates

    def _should_collect(self, take_commands: Callable[[], bool] | None) -> bool:
        """Takes commands while the oldest step runs. Returns False if another step should be launched first. If a step
        hangs, this stops and the engine falls silent, which is how watchdogs notice."""
        flight, until = self._in_flight[0], self._clock() + LISTEN_S
        while take_commands is not None and flight.is_running and self._clock() < until:
            if take_commands() and len(self._in_flight) == 1:
                return False
        return True

    def _launch(self, plan: StepPlan) -> None:
        """Composes and executes piece by piece: the device works on one while the host composes the next."""
        flight = Flight(plan=plan)
        self._in_flight.append(flight)  # first, so that an interrupted plan is still committed
        try:
            for chunk in plan.chunks:
                if not self._live[chunk.request_id].sequence:
                    self._begin(self._live[chunk.request_id])
            flight.failed = self._encoder.encode(plan, self._live) if plan.encode else {}
            orders, flight.sampled = self.composer.run(plan, self._live)
            flight.summed = [self._live[chunk.request_id] for chunk in plan.chunks if chunk.num_summed]
            flight.picked = [self._live[chunk.request_id] for chunk in plan.chunks if chunk.picks_logits]
            names = [chunk.request_id for chunk in plan.chunks]
            flight.passes = self.passes.add("language", orders.passes, names, self._clock())
            flight.ticket = self.executor.execute(orders)
            sample, flight.matchers = self.composer.sample(plan.step, flight.sampled, self._live)
            if sample is not None:
                self.executor.execute(sample)
                if sample.sampler is not None:
                    self.passes.follow(flight.passes, sample.sampler, [chunk.request_id for chunk in flight.sampled])
            if flight.ticket.is_done:  # always the case on a CPU
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
        live.pooled = None  # a preempted request recomputes all rows
        live.matcher = None if live.compiled is None else Matcher(live.compiled, request.output_ids)
        live.sequence = self._free_sequences.pop()
        if (orders := begin(live, self.composer.vocab_size)) is not None:
            self.executor.execute(orders)

    def _collect(self) -> list[Update]:
        """Waits for the oldest step and commits its results. It waits even for a failed step, whose passes may still
        read pages and blocks that the next plans reassign."""
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
            updates = self._complete(self.scheduler.commit(flight.plan, failed))
        else:
            self.step_tokens.note(sum(chunk.count for chunk in flight.plan.chunks))
            updates = self._prompt_updates(flight.plan, result)
            news = self.scheduler.commit(flight.plan, flight.results(result))
            updates += self._complete(news, {flight.sampled[row].request_id: one for row, one in result.scores.items()})
            for update in news:
                matcher = flight.matchers.get(update.request_id)
                if matcher is not None and update.finish is None and matcher.is_complete:
                    # The grammar allows nothing more, so no further pass is needed.
                    updates += self._complete(self.scheduler.stop(update.request_id, None))
        if flight.plan.encode:
            for live in self._live.values():
                if live.request.status is not Status.RUNNING:  # preempted, because it read rows of a failed image
                    self._release(live)
        return updates

    def _prompt_updates(self, plan: StepPlan, result: StepResult) -> list[Update]:
        scored = [chunk for chunk in plan.chunks if chunk.wants_all_logits]
        return [
            Update(name, prompt_scores=PromptScores(1 + max(chunk.start, live.request.first_scored_row), scores))
            for chunk, scores in zip(scored, result.prompt_scores, strict=True)
            if (live := self._live.get(name := chunk.request_id)) is not None
        ]

    def _complete(self, updates: Iterable[Update], scores: Mapping[str, Scores] = NO_SCORES) -> list[Update]:
        """Adds scores of tokens to updates and, when a request ends, timings. Forgets requests that have ended."""
        completed = []
        for update in updates:
            name, timings, passes, pooled = update.request_id, None, None, None
            live = self._live[name]
            if update.token_ids and live.first_token is None:
                live.first_token = self._clock()
            if update.finish is not None:
                timings, passes = live.timings(self._clock()), self.passes.take_counts(name)
                pooled = finished_vector(live) if update.finish.reason is FinishReason.LENGTH else None
                if self._trace is not None:
                    self._trace.note_end(live, update.finish.reason)
                self._release(live)
                self._pixels.count(live.prompt, -1)
                del self._live[name]
            found = scores.get(name) if update.token_ids else None
            completed.append(replace(update, scores=found, timings=timings, passes=passes, pooled=pooled))
        return completed

    def _release(self, live: LiveRequest) -> None:
        """Frees a sequence. Steps in flight may still write its newest token, but its next owner writes later."""
        self._encoder.forget(live.request.id)
        if live.sequence:
            self._free_sequences.append(live.sequence)
            live.sequence = 0

"""The scheduler decides what the next step computes: which images to encode, which prompt chunks and which outputs.

The policy, under one token budget per step. "In order" is by priority, then in fair turns of tenants, then by arrival.
1. Outputs come first: one row for every request that is decoding, in order. If blocks run out, the last request in
   order is preempted: it frees its blocks and is recomputed later. A request that runs alone is never preempted.
2. Prompts that have started come next, in order, in chunks. If the step also has outputs, the pace may limit prompts to
   fewer rows than the budget leaves (`pace.py`). While the first prompt takes several steps, much shorter ones of its
   priority may take up to half of each (`backlog.py`). An image that takes longer than a step is encoded in parts, over
   several steps; until the last one, no other image is encoded, and other prompts go on and start.
3. New requests start last, strictly in order, and only if no running request was skipped. A prompt gets all its blocks
   when it starts, so only outputs can run out of blocks.

Why it never stalls: the first running request can take the blocks of all others, and outputs leave at least one token
of the budget to prompts. Rows that must be computed in one piece wait until enough outputs have ended, and nothing new
starts meanwhile. A request holds an image only while it computes the image's rows, and then it can always continue. An
image that is encoded in parts belongs to a running request, and every step takes it further. If nothing runs, the
first request in order either fits or ends with an error.

Two plans can be in flight: plan k + 1 is made while step k runs. Resources that a plan in flight uses are released when
it is committed. Rows of a request that has ended by then are ignored.
"""

from collections import Counter, deque
from collections.abc import Sequence
from itertools import count
from math import inf

from saccade.cache.blocks import BlockPool
from saccade.cache.encoder import EncoderIndex, Entry
from saccade.cache.prefix import PrefixCache
from saccade.errors import RequestError
from saccade.scheduling.backlog import backlog_of, short_prompt_limit
from saccade.scheduling.fair_clock import FairClock
from saccade.scheduling.pace import Pace
from saccade.scheduling.request import Request, RequestQueue, Status
from saccade.scheduling.request_checks import check_fits, check_queue
from saccade.scheduling.resources import Resources
from saccade.scheduling.step_plan import Chunk, Draft, Results, RowError, StepPlan
from saccade.wire.engine_metrics import SchedulerStats
from saccade.wire.engine_settings import SchedulerSettings
from saccade.wire.update import Finish, FinishReason, Update


class Scheduler:
    """Pure bookkeeping. `plan` and `commit` alternate, with at most two uncommitted plans. Invariant: a live request is
    either waiting or running; `Resources` tracks what it owns."""

    def __init__(
        self,
        settings: SchedulerSettings,
        *,
        pool: BlockPool,
        encoder: EncoderIndex,
        prefix: PrefixCache | None = None,
    ) -> None:
        self.settings = settings
        self.resources = Resources(pool, encoder, prefix)
        self.num_preemptions = 0
        self.live: dict[str, Request] = {}  # unfinished requests by id
        self._families: dict[str, dict[str, Request]] = {}  # live requests of each family (a request and its forks)
        self._waiting = RequestQueue(lambda request: request.order)
        self._running = RequestQueue(lambda request: request.order)
        self._deadlines = RequestQueue(lambda request: (request.deadline, request.order))
        self._fair_clock = FairClock()
        self.pace: Pace | None = None  # set once passes have been timed
        self._flights: deque[Draft] = deque()
        self._arrivals = count()
        self._steps = count()

    @property
    def is_idle(self) -> bool:
        return not (self.live or self._flights)

    @property
    def _num_startable(self) -> int:
        return self.settings.max_num_seqs - len(self._running)

    def add(self, request: Request) -> tuple[str, ...]:
        """Queues a request and, for n > 1, its forks: all or none. Returns their ids."""
        check_fits(request, self.settings, self.resources.pool, self.resources.encoder)
        family = {member.id: member for member in (request, *map(request.fork, range(1, request.params.n)))}
        if request.id in self._families or family.keys() & self.live.keys():
            raise RequestError(f"request {request.id!r} is still running; ids must be unique", param="request_id")
        check_queue(tuple(family.values()), self._waiting, self.settings, self._num_startable)
        room = self.settings.max_model_len - len(request.prompt_ids)
        if not self.live:
            self._fair_clock = FairClock()
        for member in family.values():
            asked = member.params.max_tokens
            member.max_outputs = room if asked is None else min(room, asked)
            member.fair_start = self._fair_clock.enter(member.tenant, member.fair_cost)
            member.order = (member.priority, member.fair_start, member.arrival, next(self._arrivals))
            self._waiting.add(member)
            if member.deadline is not None:
                self._deadlines.add(member)
        self.live |= family
        self._families[request.id] = dict(family)
        return tuple(family)

    def abort(self, request_id: str) -> tuple[Update, ...]:
        """Ends a request with all its forks, or a single fork. Requests that have already ended give no updates."""
        one = {request_id: self.live[request_id]} if request_id in self.live else {}
        members = tuple((self._families.get(request_id) or one).values())
        return tuple(self._end(member, Finish(FinishReason.ABORT)) for member in members)

    def stop(self, request_id: str, detail: str | None) -> tuple[Update, ...]:
        """Ends one request. `detail` is the stop string found in its text, or None if its grammar is complete."""
        request = self.live.get(request_id)
        return () if request is None else (self._end(request, Finish(FinishReason.STOP, detail)),)

    def plan(self, now: float) -> StepPlan:
        """Decides the next step. An empty plan needs no commit."""
        assert len(self._flights) < 2, "two plans are in flight; commit the older one first"
        settings = self.settings
        draft = Draft(
            next(self._steps),
            self.resources,
            tokens_left=settings.max_num_batched_tokens,
            encoder_left=settings.encoder_budget_tokens,
            max_chunk_rows=settings.prefill_chunk_tokens,
        )
        self._expire(now, draft)
        decoding, prefilling = [], []
        for request in self._running:
            if request.is_decoding:
                decoding.append(request)
            elif request.num_left:
                prefilling.append(request)
        for request in decoding:
            if request.status is Status.RUNNING:  # else preempted for an earlier one
                has_slot = self._find_slot(request, draft)  # may preempt the request itself
                self._plan_rows(request, request.num_planned + has_slot, draft)
        prefilling = [request for request in prefilling if request.status is Status.RUNNING]  # else preempted
        if draft.chunks and self.pace is not None:
            backlog = backlog_of(prefilling, self._waiting, self._num_startable, now)
            draft.paced = self.pace.begin(len(draft.chunks), backlog)
        draft.continue_encoding()
        self._plan_prompts(prefilling, draft)
        if draft.chunks:
            self._flights.append(draft)
        return draft.plan()

    def commit(self, plan: StepPlan, results: Results) -> tuple[Update, ...]:
        """Applies a plan's results: one token per chunk that wants logits, or an error for any chunk."""
        if not plan.chunks:
            return ()
        flight = self._flights.popleft()
        assert flight.step == plan.step, f"plan {plan.step} is committed, plan {flight.step} is due"
        if flight.encode:
            self._drop_failed_media(flight, results)
        updates: list[Update] = []
        for request, chunk in flight.chunks.items():
            if request.status is not Status.FINISHED and request not in flight.void:
                updates += self._commit_chunk(request, chunk, results.get(request.id, ()))
        for held in flight.held:
            self.resources.release(held)
        return tuple(updates)

    def forget_cached(self) -> bool:
        """Empties the prefix and encoder caches. Does nothing and returns False while requests run or wait."""
        if not self.is_idle:
            return False
        self.resources.encoder.clear()
        self.resources.pool.forget()
        return True

    def stats(self) -> SchedulerStats:
        pool, encoder = self.resources.pool, self.resources.encoder
        return SchedulerStats(
            waiting=len(self._waiting),
            waiting_tokens=self._waiting.num_prompt_tokens,
            running=len(self._running),
            kv_usage=pool.num_used / (pool.num_blocks - 1),
            encoder_usage=encoder.num_held_rows / encoder.max_rows,
            preemptions=self.num_preemptions,
            prefix_queried_tokens=self.resources.num_queried_tokens,
            prefix_hit_tokens=self.resources.num_hit_tokens,
            encoder_queries=encoder.num_hits + encoder.num_misses,
            encoder_hits=encoder.num_hits,
        )

    def check(self) -> None:
        """Asserts the invariants of the scheduler and of everything it accounts for."""
        waiting, running = set(self._waiting), set(self._running)
        assert not waiting & running, f"{waiting & running} wait and run"
        assert waiting | running == set(self.live.values()), "a live request is in no queue, or an ended one is in one"
        families = [request for members in self._families.values() for request in members.values()]
        assert len(families) == len(self.live) and set(families) == waiting | running, "families differ from requests"
        assert set(self._deadlines) == {r for r in waiting | running if r.deadline is not None}, "deadlines differ"
        assert len(running) <= self.settings.max_num_seqs, f"{len(running)} requests run"
        for queue in (self._waiting, self._running, self._deadlines):
            queue.check()
        self._fair_clock.check(Counter(request.tenant for request in waiting if request.status is Status.WAITING))
        for request in waiting | running:
            request.check_progress(self.resources.pool.block_size)
        for flight in self._flights:
            assert flight.tokens_left >= 0, f"over the budget: {flight}"
            owned = {block for chunk in flight.chunks.values() for block in chunk.blocks}
            assert not any(map(self.resources.pool.is_free, owned)), "a plan in flight uses a free block"
        self.resources.check(self._running, [held for flight in self._flights for held in flight.held])

    def _plan_prompts(self, prefilling: Sequence[Request], draft: Draft) -> None:
        """Plans prompts in order, with one exception: while short prompts wait for a long one, half of the step is set
        aside for the long one and the short ones are planned first. The long one also gets the rows they leave. Whoever
        occupies the vision buffers counts as short, because all other images wait for it."""
        limit = short_prompt_limit(prefilling, self._waiting, self._num_startable, draft.prompt_rows_left)
        num_reserved = draft.rows_in_half(prefilling[0]) if limit else 0
        if not num_reserved:
            self._plan_in_order(prefilling, draft)
            return
        long, *others = prefilling
        draft.take(num_reserved)
        short = [
            other
            for other in others
            if (other.num_left <= limit and other.priority == long.priority) or draft.is_encoding(other)
        ]
        self._plan_in_order(short, draft, last_priority=long.priority)
        draft.take(-num_reserved)
        self._plan_rows(long, draft.reach(long, long.num_planned), draft)

    def _plan_in_order(self, prefilling: Sequence[Request], draft: Draft, last_priority: float = inf) -> None:
        for request in prefilling:
            self._plan_rows(request, draft.reach(request, request.num_planned), draft)
        if not draft.has_skipped:
            self._admit(draft, last_priority)

    def _plan_rows(self, request: Request, end: int, draft: Draft) -> None:
        if end > request.num_planned:
            draft.add_rows(request, end)
        elif not (draft.is_encoding(request) and draft.items):  # else it waits for parts, of which this step runs some
            draft.has_skipped = True

    def _find_slot(self, request: Request, draft: Draft) -> bool:
        """Makes room for the next row. Later requests can be preempted; earlier ones already have their rows."""
        while not self.resources.grow(request):
            if any(flight.held for flight in self._flights):
                return False  # the next commit frees blocks
            if len(self._running) == 1:
                if not self._is_in_flight(request):  # else its pending token may turn out to be the last
                    draft.updates.append(self._end(request, self._no_room(request)))
                return False
            victim = self._running.last
            self._preempt(victim)
            draft.preempted.append(victim.id)
            if victim is request:
                return False
        return True

    def _admit(self, draft: Draft, last_priority: float) -> None:
        for request in self._waiting:
            if not (self._num_startable and draft.prompt_rows_left) or request.priority > last_priority:
                return
            if self._is_ready(request) and not self._start(request, draft):
                return

    def _is_ready(self, request: Request) -> bool:
        """A fork waits until its parent's prompt is computed, a preempted request until no row of it is in flight."""
        parent = request.parent
        is_forked = parent is None or parent.status is Status.FINISHED or len(parent.output_ids) > 0
        return is_forked and not self._is_in_flight(request)

    def _start(self, request: Request, draft: Draft) -> bool:
        shared = self.resources.shareable(request, spare=len(self._running))
        if shared is None:
            if self._running or self._flights:
                return False
            draft.updates.append(self._end(request, self._no_room(request)))
            return True
        start = len(shared) * self.resources.pool.block_size
        end = draft.reach(request, start)
        if end == start and not draft.is_encoding(request):
            return False
        self._waiting.remove(request)
        self._running.add(request)
        if request.status is Status.WAITING:
            self._fair_clock.begin(request.tenant, request.fair_start, request.fair_cost)
        request.status = Status.RUNNING
        self.resources.start(request, shared)
        self._plan_rows(request, end, draft)
        return True

    def _expire(self, now: float, draft: Draft) -> None:
        for request in self._deadlines:
            if request.deadline is None or request.deadline > now:
                return
            late = f"the deadline passed {now - request.deadline:.3f} s ago"
            draft.updates.append(self._end(request, Finish(FinishReason.DEADLINE, late)))

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        self._running.remove(request)
        self._waiting.add(request)
        self._give_back(request)
        request.reset()

    def _commit_chunk(self, request: Request, chunk: Chunk, result: object) -> list[Update]:
        if isinstance(result, RowError):
            return [self._end(request, Finish(FinishReason.ERROR, result.message))]
        if chunk.wants_all_logits:
            request.num_scored = max(request.num_scored, min(chunk.end, len(request.prompt_ids)))
        if request.status is Status.RUNNING:  # else preempted since: its token counts, its rows are lost
            request.num_computed = chunk.end
            request.num_pending -= chunk.wants_logits
            self.resources.advance(request)
        if not chunk.wants_logits:
            is_done = request.max_outputs == 0 and chunk.end == len(request.prompt_ids)
            return [self._end(request, Finish(FinishReason.LENGTH))] if is_done else []
        assert isinstance(result, list | tuple) and len(result) == 1, f"{request.id} wants a token, got {result}"
        request.output_ids.append(result[0])
        finish = request.check_stop()
        if finish is not None:
            self._end(request, finish)
        return [Update(request.id, (result[0],), finish=finish)]

    def _drop_failed_media(self, flight: Draft, results: Results) -> None:
        """Rows encoded for a failed request may be wrong, so other requests that read them start again."""
        failed = {request for request in flight.chunks if isinstance(results.get(request.id), RowError)}
        failed_ids = {request.id for request in failed}
        flights = (flight, *self._flights)
        for entry, item in flight.encode.items():
            if item.request_id not in failed_ids:
                continue
            self.resources.encoder.discard(entry)
            for request in self._readers(entry, flights):
                if request in failed:
                    continue
                for other in flights:
                    other.void.add(request)
                if request.status is Status.RUNNING:
                    self._preempt(request)

    def _readers(self, entry: Entry, flights: Sequence[Draft]) -> list[Request]:
        """Requests that hold an entry, and those whose chunks in flight read it: a preempted one no longer holds it."""
        holders = [request for request in self._running if entry in request.entries.values()]
        return list(dict.fromkeys(sum((flight.readers(entry) for flight in flights), start=holders)))

    def _end(self, request: Request, finish: Finish) -> Update:
        if request.status is Status.RUNNING:
            self._running.remove(request)
            self._give_back(request)
        else:
            self._waiting.remove(request)
            if request.status is Status.WAITING:
                self._fair_clock.leave(request.tenant)
        if request.deadline is not None:
            self._deadlines.remove(request)
        request.status, request.finish = Status.FINISHED, finish
        family = request.parent.id if request.parent else request.id
        del self.live[request.id], self._families[family][request.id]
        if not self._families[family]:
            del self._families[family]
        return Update(request.id, (), finish=finish)

    def _give_back(self, request: Request) -> None:
        """Releases a request's resources now, or when the last plan in flight with its rows is committed."""
        held = self.resources.detach(request)
        users = [flight for flight in self._flights if request in flight.chunks]
        if users:
            users[-1].held.append(held)
        else:
            self.resources.release(held)

    def _is_in_flight(self, request: Request) -> bool:
        return any(request in flight.chunks for flight in self._flights)

    def _no_room(self, request: Request) -> Finish:
        limit = f"the KV cache has room for {self.resources.pool.num_tokens} (--gpu-memory-utilization)"
        return Finish(FinishReason.ERROR, f"the request needs room for {request.num_tokens} tokens; {limit}")

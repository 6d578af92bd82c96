"""A simulated device whose slots hold a digest of everything that led to them. So wrong sharing, a stale cache hit or a
missing recompute gives a wrong token, and is also caught where it happens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from saccade.cache.blocks import BlockPool
from saccade.cache.encoder import EncoderIndex
from saccade.cache.prefix import PrefixCache, Span
from saccade.scheduling.request import Request
from saccade.scheduling.scheduler import Scheduler
from saccade.scheduling.step_plan import Chunk, Results, RowError, StepPlan
from saccade.wire.engine_settings import SchedulerSettings
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.update import FinishReason, Update

VOCABULARY = 40
EOS = 3
IMAGE_TOKEN = 39


def make_scheduler(
    limits: SchedulerSettings,
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    encoder_rows: int = 128,
    page_rows: int = 4,
    has_prefix: bool = True,
    keeps_images: bool = True,
) -> Scheduler:
    pool = BlockPool(num_blocks, block_size)
    prefix = PrefixCache(pool, model=b"simulated") if has_prefix else None
    encoder = EncoderIndex(encoder_rows, page_rows, keeps_idle=keeps_images)
    return Scheduler(limits, pool=pool, encoder=encoder, prefix=prefix)


def make_request(
    request_id: str,
    prompt: Sequence[int],
    *,
    spans: tuple[Span, ...] = (),
    params: SamplingParams | None = None,
    arrival: float = 0.0,
    priority: int = 0,
    deadline: float | None = None,
    salt: str | None = None,
    tenant: str = "",
    weight: float = 1.0,
) -> Request:
    return Request(
        id=request_id,
        prompt_ids=tuple(prompt),
        spans=spans,
        params=params or SamplingParams(seed=0),
        eos_token_ids=frozenset({EOS}),
        arrival=arrival,
        priority=priority,
        deadline=deadline,
        cache_salt=salt,
        tenant=tenant,
        weight=weight,
    )


def image(offset: int, length: int, name: bytes = b"i", *, media_idx: int = 0, is_whole: bool = False) -> Span:
    return Span(offset, length, name * 16, media_idx=media_idx, is_whole=is_whole)


def with_images(text: int, *spans: Span, token: int = 5) -> list[int]:
    """A prompt of `text` tokens, with placeholders in the rows of spans."""
    inside = {row for span in spans for row in range(span.offset, span.end)}
    return [IMAGE_TOKEN if i in inside else token + i % 7 for i in range(text)]


def oracle(request: Request, max_model_len: int) -> list[int]:
    """The outputs that a request has when it runs alone."""
    params, outputs = request.params, list[int]()
    room = max_model_len - len(request.prompt_ids)
    if params.max_tokens == 0:
        return []
    contents = list(_chain(request, request.prompt_ids, 0, b""))
    while True:
        token = _sample(request, contents[-1])
        outputs.append(token)
        is_end = (token == EOS and not params.ignore_eos) or token in params.stop_token_ids
        if len(outputs) >= min(room, params.max_tokens or room) or (is_end and len(outputs) >= params.min_tokens):
            return outputs
        contents += _chain(request, (token,), len(contents), contents[-1])


@dataclass
class Device:
    """Runs plans in launch order."""

    scheduler: Scheduler
    slots: dict[tuple[int, int], bytes] = field(default_factory=dict)
    rows: dict[int, tuple[bytes, int]] = field(default_factory=dict)
    unfinished: tuple[tuple[int, ...], int] | None = None  # pages of an item, and how many parts of it have run
    sampled: dict[str, int] = field(default_factory=dict)
    scored: dict[str, set[int]] = field(default_factory=dict)
    poisoned: dict[str, int] = field(default_factory=dict)  # requests that read garbage, and in which step

    def run(self, plan: StepPlan, requests: dict[str, Request], failing: Sequence[str] = ()) -> Results:
        """Returns the tokens of a plan. Requests in `failing` get an error, and rows encoded for them are garbage."""
        for item in plan.encode:
            assert item.first_part == 0 or self.unfinished == (item.pages, item.first_part), f"{item} is not next"
            self.unfinished = None if item.is_last else (item.pages, item.end_part)
            if not item.is_last:
                continue
            span = next(s for s in requests[item.request_id].spans if s.media_idx == item.media_idx)
            for row in range(item.num_rows):
                is_bad = item.request_id in failing
                self.rows[self._row(item.pages, row)] = (b"garbage" if is_bad else span.digest, row)
        befores = [self._read(chunk, requests[chunk.request_id]) for chunk in plan.chunks]
        written: set[tuple[int, int]] = set()
        results: dict[str, list[int] | RowError] = {}
        for chunk, before in zip(plan.chunks, befores, strict=True):
            request = requests[chunk.request_id]
            contents = self._compute(chunk, request, before, plan.step)
            places = [self._slot(chunk, position) for position in range(chunk.start, chunk.end)]
            assert not written & set(places), f"{chunk} writes to the same slots as another chunk of the plan"
            written |= set(places)
            self.slots.update(zip(places, contents, strict=True))
            if chunk.wants_all_logits:
                self.scored.setdefault(chunk.request_id, set()).update(range(chunk.start, chunk.end))
            if chunk.wants_logits:
                self.sampled[chunk.request_id] = _sample(request, contents[-1])
                results[chunk.request_id] = [self.sampled[chunk.request_id]]
        for request_id in failing:
            results[request_id] = RowError("injected")
        return results

    def _read(self, chunk: Chunk, request: Request) -> bytes:
        """Checks everything that a chunk reads, and returns the content of the slot before its first row."""
        assert 0 not in chunk.blocks, f"{chunk} uses the padding block"
        before = b""
        for position, before in enumerate(_chain(request, request.tokens_from(0)[: chunk.start], 0, b"")):
            found = self.slots.get(self._slot(chunk, position))
            is_right = found == before or request.id in self.poisoned
            assert is_right, f"{chunk}: the slot of position {position} holds something else"
        covered = {row for media in chunk.media for row in range(media.start, media.start + media.count)}
        media = {row for span in request.spans for row in range(span.offset, span.end)}
        assert covered == media & set(range(chunk.start, chunk.end)), f"{chunk}: its media rows are wrong"
        for span in request.spans:
            is_cut = span.is_whole and span.offset < chunk.end < span.end
            assert not is_cut, f"{chunk} divides {span}"
        return self.slots.get(self._slot(chunk, chunk.start - 1), b"") if chunk.start else b""

    def _compute(self, chunk: Chunk, request: Request, before: bytes, step: int) -> list[bytes]:
        if chunk.is_pending_input:
            assert chunk.count == 1 and chunk.start >= len(request.prompt_ids), f"{chunk} has a known input"
            tokens: Sequence[int] = [self.sampled[request.id]]
        else:
            tokens = request.tokens_from(chunk.start)[: chunk.count]
        assert len(tokens) == chunk.count, f"{chunk} has rows of unknown tokens"
        seen = {
            media.start + i: self.rows.get(self._row(media.pages, media.first_row + i))
            for media in chunk.media
            for i in range(media.count)
        }
        if any(row is not None and row[0] == b"garbage" for row in seen.values()):
            self.poisoned.setdefault(request.id, step)
        return list(_chain(request, tokens, chunk.start, before, seen))

    def _slot(self, chunk: Chunk, position: int) -> tuple[int, int]:
        size = self.scheduler.resources.pool.block_size
        return chunk.blocks[position // size], position % size

    def _row(self, pages: tuple[int, ...], row: int) -> int:
        page_rows = self.scheduler.resources.encoder.page_rows
        assert 0 not in pages, "the padding page is used"
        return pages[row // page_rows] * page_rows + row % page_rows


@dataclass
class Loop:
    """Drives a scheduler like an engine: at most two plans in flight. Keeps every event and checks the invariants."""

    scheduler: Scheduler
    device: Device = field(init=False)
    requests: dict[str, Request] = field(default_factory=dict)
    events: dict[str, list[Update]] = field(default_factory=dict)
    flights: list[tuple[StepPlan, Results]] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.device = Device(self.scheduler)

    def add(self, request: Request) -> None:
        ids = self.scheduler.add(request)
        for request_id in ids:
            assert request_id not in self.requests
            self.requests[request_id] = self.scheduler.live[request_id]
            self.events[request_id] = []
        self.scheduler.check()

    def launch(self, failing: Sequence[int] = ()) -> StepPlan:
        """Plans and runs a step. `failing` picks chunks of the plan that get an error."""
        is_alone = not self.flights
        plan = self.scheduler.plan(self.now)
        self.plans.append(plan)
        self.take(plan.updates)
        stuck = is_alone and not plan.chunks and not plan.updates and not self.scheduler.is_idle
        assert not stuck, f"nothing is in flight and nothing is planned: {plan}"
        self._check_hazards(plan)
        if plan.chunks:
            bad = [plan.chunks[i % len(plan.chunks)].request_id for i in failing]
            self.flights.append((plan, self.device.run(plan, self.requests, bad)))
        self.scheduler.check()
        return plan

    def land(self) -> None:
        plan, results = self.flights.pop(0)
        self.take(self.scheduler.commit(plan, results))
        self.device.poisoned = {k: step for k, step in self.device.poisoned.items() if step != plan.step}
        self.scheduler.check()

    def abort(self, request_id: str) -> None:
        self.take(self.scheduler.abort(request_id))
        self.scheduler.check()

    def step(self, failing: Sequence[int] = ()) -> StepPlan:
        plan = self.launch(failing)
        while self.flights:
            self.land()
        return plan

    def drain(self, *, is_pipelined: bool = True, max_steps: int = 3000) -> int:
        for step in range(max_steps):
            if self.scheduler.is_idle:
                return step
            self.launch()
            while len(self.flights) > (1 if is_pipelined and self.plans[-1].chunks else 0):
                self.land()
        raise AssertionError(f"not idle after {max_steps} steps")

    def take(self, events: Sequence[Update]) -> None:
        for event in events:
            mine = self.events[event.request_id]
            assert not mine or mine[-1].finish is None, f"{event} after the finish"
            mine.append(event)

    def outputs(self, request_id: str) -> list[int]:
        return [token for event in self.events[request_id] for token in event.token_ids]

    def finish_reason(self, request_id: str) -> FinishReason | None:
        finish = self.events[request_id][-1].finish if self.events[request_id] else None
        return finish.reason if finish else None

    def check_ended(self) -> None:
        """Everything was released, and every request ended with the tokens it would have had alone."""
        stats = self.scheduler.stats()
        assert (stats.kv_usage, stats.encoder_usage, stats.waiting, stats.running) == (0, 0, 0, 0)
        for request_id, request in self.requests.items():
            expected = oracle(request, self.scheduler.settings.max_model_len)
            got, reason = self.outputs(request_id), self.finish_reason(request_id)
            if reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert got == expected, f"{request_id}: {got}, but {expected} if it runs alone"
            else:
                assert reason is not None, f"{request_id} never ended"
                is_part = got == expected[: len(got)] and len(got) < max(len(expected), 1)
                assert is_part, f"{request_id}: {got} is not a part of {expected}"

    def _check_hazards(self, plan: StepPlan) -> None:
        """A new plan must not write to blocks and pages that a plan in flight reads for another request."""
        size = self.scheduler.resources.pool.block_size
        for older, _ in self.flights:
            for chunk in plan.chunks:
                mine = set(chunk.blocks[chunk.start // size :])
                for other in older.chunks:
                    if self.requests[other.request_id] is not self.requests[chunk.request_id]:
                        assert not mine & set(other.blocks), f"{chunk} writes blocks of {other}, which is in flight"
            pages = {page for chunk in older.chunks for media in chunk.media for page in media.pages}
            assert not any(pages & set(item.pages) for item in plan.encode), "pages in flight are overwritten"


def _chain(
    request: Request,
    tokens: Sequence[int],
    start: int,
    before: bytes,
    seen: dict[int, tuple[bytes, int] | None] | None = None,
) -> Iterator[bytes]:
    """Contents of the slots from `start` on. `seen` has the media rows that were read; without it they are correct."""
    for position, token in enumerate(tokens, start):
        span = next((s for s in request.spans if s.offset <= position < s.end), None)
        row: object = None
        if span is not None:
            right = (span.digest, span.first_row + position - span.offset)
            row = (right if seen is None else seen[position], span.layout)
        material = repr((request.cache_salt, token, position, row)).encode()
        before = blake2b(before + material, digest_size=16).digest()
        yield before


def _sample(request: Request, content: bytes) -> int:
    seed = repr(request.params.seed).encode()
    return int.from_bytes(blake2b(content + seed, digest_size=4).digest(), "big") % (VOCABULARY - 1)

"""Everything at once: random requests, limits, aborts, errors, deadlines and pipelining on the simulated device."""

from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from saccade.cache.prefix import Span
from saccade.choice.costs import Curve
from saccade.errors import CapacityError, RequestError
from saccade.scheduling.pace import Pace
from saccade.wire.engine_settings import SchedulerSettings
from saccade.wire.sampling_params import SamplingParams
from tests.engine.simulated import IMAGE_TOKEN, Loop, make_request, make_scheduler

# Pieces of prompts, few enough that prompts share prefixes. A number n is n tokens of text, a letter an image.
PIECES = st.lists(st.sampled_from([1, 2, 3, 5, 8, "a", "b", "c", "v", "w"]), min_size=1, max_size=6)
ROWS = {"a": 1, "b": 4, "c": 7, "v": 3, "w": 3}  # v and w are one video at two speeds, in two spans with text between

PACE = Pace(Curve(((1, 0.01), (40, 0.4))), Curve(((1, 0.005), (20, 0.1))), 0.05, ((4, 20), (8, 30)), min_prompt_rows=1)
DIVIDING = replace(PACE, max_step_s=0.02, num_parts=lambda num_rows: num_rows)


def build(pieces: list[int | str], is_whole: bool) -> tuple[list[int], tuple[Span, ...]]:
    prompt, spans = list[int](), list[Span]()
    for media_idx, piece in enumerate(pieces):
        if isinstance(piece, int):
            prompt += [10 + piece + i for i in range(piece)]
            continue
        digest, layout = ("v" if piece == "w" else piece).encode() * 16, b"slow" if piece == "w" else b""
        for first_row in (0, ROWS[piece]) if piece in "vw" else (0,):
            spans.append(Span(len(prompt), ROWS[piece], digest, media_idx, first_row, layout, is_whole))
            prompt += [IMAGE_TOKEN] * ROWS[piece] + ([30] if piece in "vw" else [])
    return prompt, tuple(spans)


@st.composite
def sampling(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.sampled_from([0, 1, 3, 9, 20, None, None]))
    return SamplingParams(
        n=draw(st.sampled_from([1, 1, 1, 2, 3])),
        seed=draw(st.integers(0, 3)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, 4 if max_tokens is None else min(max_tokens, 4))),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.sampled_from([(), (), (4, 5)])),
        prompt_logprobs=draw(st.sampled_from([None, None, 0])),
    )


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_slots=st.integers(12, 90),
        block_size=st.integers(1, 5),
        pages=st.integers(3, 12),
        page_rows=st.integers(1, 4),
        has_prefix=st.booleans(),
        keeps_images=st.booleans(),
        is_whole=st.booleans(),
        max_num_seqs=st.integers(1, 6),
        extra_tokens=st.integers(0, 30),
        chunk=st.sampled_from([0, 0, 3, 7]),
        encoder_budget=st.integers(1, 12),
        max_model_len=st.integers(16, 60),
        pace=st.sampled_from([None, PACE, replace(PACE, max_step_s=0.001), replace(PACE, max_step_s=0.0), DIVIDING]),
    )
    def start(
        self,
        num_slots: int,
        block_size: int,
        pages: int,
        page_rows: int,
        has_prefix: bool,
        keeps_images: bool,
        is_whole: bool,
        max_num_seqs: int,
        extra_tokens: int,
        chunk: int,
        encoder_budget: int,
        max_model_len: int,
        pace: Pace | None,
    ) -> None:
        limits = SchedulerSettings(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_tokens,
            max_model_len=max_model_len,
            prefill_chunk_tokens=chunk,
            encoder_budget_tokens=encoder_budget,
            max_queued_requests=12,
            max_queued_tokens=200,
        )
        scheduler = make_scheduler(
            limits,
            num_blocks=num_slots // block_size + 1,
            block_size=block_size,
            encoder_rows=pages * page_rows,
            page_rows=page_rows,
            has_prefix=has_prefix,
            keeps_images=keeps_images,
        )
        scheduler.pace = pace
        self.loop = Loop(scheduler)
        self.is_whole = is_whole
        self.count = 0

    @rule(
        pieces=PIECES,
        params=sampling(),
        salt=st.sampled_from([None, None, None, "x"]),
        priority=st.sampled_from([0, 0, 1, -1]),
        patience=st.sampled_from([None, None, None, None, None, 8.0]),
        copies=st.sampled_from([1, 1, 4]),
        tenant=st.sampled_from(["a", "a", "b", "c"]),
    )
    def add(
        self,
        pieces: list[int | str],
        params: SamplingParams,
        salt: str | None,
        priority: int,
        patience: float | None,
        copies: int,
        tenant: str,
    ) -> None:
        for copy in range(copies):
            self.add_one([*pieces, copy + 1], params, salt, priority, patience, tenant)

    def add_one(
        self,
        pieces: list[int | str],
        params: SamplingParams,
        salt: str | None,
        priority: int,
        patience: float | None,
        tenant: str,
    ) -> None:
        prompt, spans = build(pieces, self.is_whole)
        self.count += 1
        request = make_request(
            f"r{self.count}",
            prompt,
            spans=spans,
            params=params,
            arrival=self.loop.now,
            priority=priority,
            deadline=None if patience is None else self.loop.now + patience,
            salt=salt,
            tenant=tenant,
            weight=2.0 if tenant == "b" else 1.0,
        )
        before = self.loop.scheduler.stats()
        try:
            self.loop.add(request)
        except CapacityError:
            assert before.waiting > 0
            assert before.waiting + params.n > 12 or before.waiting_tokens + params.n * len(prompt) > 200
        except RequestError:
            assert not self.fits(request.prompt_ids, spans, params)
            assert self.loop.scheduler.stats() == before
        else:
            assert self.fits(request.prompt_ids, spans, params)

    def fits(self, prompt: tuple[int, ...], spans: tuple[Span, ...], params: SamplingParams) -> bool:
        scheduler = self.loop.scheduler
        rows = [sum(s.length for s in spans if s.media_idx == i) for i in {s.media_idx for s in spans}]
        return (
            len(prompt) + (params.max_tokens != 0) <= scheduler.settings.max_model_len
            and len(prompt) <= scheduler.resources.pool.num_tokens
            and max(rows, default=0) <= scheduler.resources.encoder.max_rows
            and (
                not self.is_whole
                or max((s.length for s in spans), default=0) <= scheduler.settings.max_num_batched_tokens
            )
        )

    @precondition(lambda self: len(self.loop.flights) < 2)
    @rule()
    def launch(self) -> None:
        self.loop.now += 1
        self.loop.launch()

    @precondition(lambda self: self.loop.flights)
    @rule()
    def land(self) -> None:
        self.loop.land()

    @rule(count=st.integers(1, 30))
    def run_in_pipeline(self, count: int) -> None:
        for _ in range(count):
            self.loop.now += 1
            if len(self.loop.flights) == 2:
                self.loop.land()
            self.loop.launch()

    @precondition(lambda self: len(self.loop.flights) < 2)
    @rule(failing=st.lists(st.integers(0, 7), max_size=1))
    def launch_with_errors(self, failing: list[int]) -> None:
        self.loop.launch(failing)

    @precondition(lambda self: self.loop.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Aborts one of few names, so that most requests end by themselves."""
        self.loop.abort(data.draw(st.sampled_from([f"r{n}{x}" for n in range(1, 30, 4) for x in ("", ":1")])))

    @rule()
    def forget_cached(self) -> None:
        """Only an idle scheduler empties its caches; later requests are computed from scratch."""
        scheduler = self.loop.scheduler
        was_idle = scheduler.is_idle
        assert scheduler.forget_cached() == was_idle
        assert not was_idle or not (scheduler.resources.prefix or ())
        scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        while self.loop.flights:
            self.loop.land()
        self.loop.drain()
        self.loop.check_ended()
        for request in self.loop.requests.values():
            self.check_scores(request.id)

    def check_scores(self, request_id: str) -> None:
        """Prompt scores cover every prompt row of a request that asked for them and ended by itself."""
        request = self.loop.requests[request_id]
        scored = self.loop.device.scored.get(request_id, set())
        if request.params.prompt_logprobs is None:
            assert not scored
        elif self.loop.finish_reason(request_id) in ("stop", "length"):
            assert scored >= set(range(len(request.prompt_ids)))


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=300,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

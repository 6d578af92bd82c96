"""How much work waiting prompts are, which prompts get the rows of a step, and what a prompt can rely on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.choice.costs import Curve
from saccade.scheduling.backlog import backlog_of
from saccade.scheduling.pace import Backlog, Pace, PacedStep
from saccade.scheduling.request import Request, RequestQueue, Status
from saccade.scheduling.step_plan import StepPlan
from saccade.wire.engine_settings import SchedulerSettings
from saccade.wire.sampling_params import SamplingParams
from tests.engine.simulated import Loop, image, make_request, make_scheduler, with_images

BUDGET = 16
LIMITS = SchedulerSettings(max_num_seqs=12, max_num_batched_tokens=BUDGET, max_model_len=400, encoder_budget_tokens=16)


def make_loop() -> Loop:
    return Loop(make_scheduler(LIMITS, num_blocks=2000, encoder_rows=64, has_prefix=False))


def text(name: str, length: int, num_outputs: int = 1, priority: int = 0) -> Request:
    params = SamplingParams(ignore_eos=True, max_tokens=num_outputs, seed=0)
    return make_request(name, [5] * length, params=params, priority=priority)


def rows(plan: StepPlan) -> dict[str, int]:
    return {chunk.request_id: chunk.count for chunk in plan.chunks}


class TestBacklog:
    def test_waiting_prompts_count_only_if_they_can_start(self) -> None:
        waiting = RequestQueue(lambda request: request.id)
        for name, arrival in (("a", 3.0), ("b", 5.0)):
            span = image(2, 40)
            waiting.add(make_request(name, with_images(100, span), spans=(span,), arrival=arrival))
        assert backlog_of([], waiting, 8, 7.0) == Backlog(200, 80, 4.0, 40)
        assert backlog_of([], waiting, 1, 7.0) == Backlog(100, 40, 4.0, 40)
        assert backlog_of([], waiting, 0, 7.0) == Backlog(), "they cannot start before others end"

    def test_a_started_prompt_counts_with_the_rows_it_has_left(self) -> None:
        loop = make_loop()
        spans = image(2, 8, b"x"), image(20, 10, b"y", media_idx=1)
        loop.add(make_request("a", with_images(60, *spans), spans=spans, arrival=1.0))
        loop.step()
        request = loop.requests["a"]
        assert (request.num_left, request.unencoded_rows) == (60 - BUDGET, [10])
        assert backlog_of([request], RequestQueue(lambda one: one.order), 3, 1.5) == Backlog(60 - BUDGET, 10, 0.5, 10)
        loop.step()
        assert request.unencoded_rows == [], "an image that is held is not encoded again"


class TestLongPrompts:
    def begin(self, length: int = 100) -> Loop:
        loop = make_loop()
        loop.add(text("long", length))
        assert rows(loop.step()) == {"long": BUDGET}
        return loop

    def test_short_prompts_get_up_to_half_of_a_long_prompts_steps(self) -> None:
        loop = self.begin()
        for name in "abc":
            loop.add(text(name, 5))
        assert rows(loop.step()) == {"a": 5, "b": 3, "long": 8}
        assert rows(loop.step()) == {"b": 2, "c": 5, "long": 9}, "the long one gets the rows they leave"
        assert rows(loop.step()) == {"long": BUDGET}

    def test_a_prompt_that_is_not_much_shorter_waits(self) -> None:
        loop = self.begin()
        loop.add(text("a", 22))
        assert rows(loop.step()) == {"long": BUDGET}, "84 rows are left, and 22 are more than a quarter"

    def test_a_prompt_that_ends_in_this_step_leaves_only_the_rest(self) -> None:
        loop = self.begin(BUDGET + 10)
        loop.add(text("a", 2))
        loop.add(text("b", 5))
        assert rows(loop.step()) == {"long": 10, "a": 2, "b": 4}

    def test_new_prompts_start_in_order_and_a_second_long_one_waits_for_the_first(self) -> None:
        loop = self.begin(200)
        loop.add(text("long2", 90))
        for name in "abc":
            loop.add(text(name, 4))
        assert rows(loop.step()) == {"long2": 8, "long": 8}, "prompts after it may start in the next step"
        assert rows(loop.step()) == {"a": 4, "b": 4, "long": 8}
        assert rows(loop.step()) == {"c": 4, "long": 12}
        assert rows(loop.step()) == {"long": BUDGET}

    @pytest.mark.parametrize(("priority", "num_rows"), [(-1, 8), (0, 8), (1, 0)])
    def test_prompts_of_a_lower_priority_wait(self, priority: int, num_rows: int) -> None:
        loop = self.begin()
        loop.add(text("a", 12, priority=priority))
        assert rows(loop.step()).get("a", 0) == num_rows

    def test_rows_left_by_short_prompts_do_not_go_to_a_lower_priority(self) -> None:
        loop = self.begin()
        loop.add(text("a", 3))
        loop.add(text("b", 3, priority=1))
        assert rows(loop.step()) == {"a": 3, "long": 13}

    def test_images_of_short_prompts_take_no_time_from_the_long_one(self) -> None:
        """A step has 200 ms. A row takes 10 ms, an image row 20."""
        loop = make_loop()
        loop.add(text("answer", 3, num_outputs=90))
        loop.step()
        times = Curve(((1, 0.01), (100, 1.0))), Curve(((1, 0.02), (100, 2.0)))
        loop.scheduler.pace = Pace(*times, max_step_s=0.2001, min_prompt_rows=1)
        loop.add(text("long", 100))
        loop.step()
        for number in range(20):
            span = image(1, 6, b"%02d" % number)
            loop.add(make_request(f"i{number}", with_images(8, span), spans=(span,)))
            assert rows(loop.step())["long"] >= 7
            if loop.requests["long"].num_left <= 32:
                return
        raise AssertionError("the long prompt made no progress")


class Arrival(NamedTuple):
    step: int
    length: int
    num_outputs: int
    priority: int


ARRIVALS = st.lists(
    st.builds(Arrival, st.integers(0, 12), st.integers(1, 150), st.integers(1, 6), st.sampled_from([0, 0, 0, 1])),
    min_size=1,
    max_size=LIMITS.max_num_seqs,
)
PACE = Pace(Curve(((1, 0.004), (8, 0.004), (100, 0.05))), min_prompt_rows=2)


class Played(NamedTuple):
    begun: list[Request]  # prompts that had started before the step, in order
    num_left: dict[Request, int]  # rows of each request before the step
    num_rows: dict[str, int]
    num_prompt_rows: int


def play(arrivals: Sequence[Arrival], pace: Pace | None) -> Iterator[Played]:
    loop, number = make_loop(), 0
    loop.scheduler.pace = pace
    while number <= max(arrival.step for arrival in arrivals) or not loop.scheduler.is_idle:
        for idx, (step, *asked) in enumerate(arrivals):
            if step == number:
                loop.add(text(str(idx), *asked))
        left = {one: one.num_left for one in loop.requests.values() if one.status is not Status.FINISHED}
        begun = sorted((r for r in left if r.status is Status.RUNNING and not r.is_decoding), key=lambda r: r.order)
        outputs = {request.id for request in left if request.is_decoding}
        found = rows(loop.step())
        yield Played(begun, left, found, sum(count for name, count in found.items() if name not in outputs))
        number += 1
    loop.check_ended()


@given(ARRIVALS)
def test_without_a_pace_no_row_of_the_budget_is_wasted(arrivals: list[Arrival]) -> None:
    for played in play(arrivals, None):
        assert sum(played.num_rows.values()) == min(BUDGET, sum(played.num_left.values()))


@pytest.mark.parametrize("pace", [None, PACE], ids=["free", "paced"])
@given(arrivals=ARRIVALS)
def test_the_first_prompt_gets_at_least_half_of_the_prompt_rows(pace: Pace | None, arrivals: list[Arrival]) -> None:
    """So a prompt waits only for earlier ones, and then takes at most twice the steps it would take alone."""
    for played in play(arrivals, pace):
        if played.begun:
            first = played.begun[0]
            assert played.num_rows[first.id] >= min(played.num_left[first], played.num_prompt_rows // 2)


@dataclass(frozen=True, slots=True)
class NotingPace(Pace):
    limits_s: list[float] = field(default_factory=list)

    def begin(self, num_outputs: int, backlog: Backlog) -> PacedStep:
        self.limits_s.append(self.limit_s(num_outputs, backlog))
        return PacedStep(self, self.limits_s[-1], num_outputs)


@given(ARRIVALS)
def test_steps_with_outputs_stay_within_their_limit(arrivals: list[Arrival]) -> None:
    pace = NotingPace(PACE.prefill, min_prompt_rows=PACE.min_prompt_rows)
    for played in play(arrivals, pace):
        if pace.limits_s and played.num_prompt_rows > pace.min_prompt_rows:
            assert pace.prefill.at(sum(played.num_rows.values())) <= pace.limits_s[-1]
        pace.limits_s.clear()

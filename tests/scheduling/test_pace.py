"""How long steps are while answers are being written, alone and in loads on a simulated H200."""

from math import inf

import pytest

from saccade.choice.costs import Curve
from saccade.scheduling.pace import FEWEST_ROWS, LONGEST_S, Pace
from tests.scheduling.paced_loads import MEASURED, USUAL, Load, simulate

TIMES = Curve(((64, 0.005), (128, 0.006), (1024, 0.022), (2048, 0.044)))
IMAGES = Curve(((256, 0.003), (2048, 0.02)))
AIMS_MS = {"560x560, 128 out, 32": 12, "1920x1080, 32 out, 16": 60, "text 512, 128 out, 64": 43}


def test_a_step_is_twice_as_long_as_its_outputs_take_alone() -> None:
    assert Pace(TIMES).limit_s(1, 0) == pytest.approx(0.01)
    assert Pace(TIMES).limit_s(128, 0) == Pace(TIMES).limit_s(128, 300) == pytest.approx(0.012)


def test_steps_get_longer_the_more_prompts_wait_up_to_a_limit() -> None:
    limits = [Pace(TIMES).limit_s(64, waiting) for waiting in (0, 8_000, 10_000, 12_000, 14_000, 100_000)]
    assert limits == sorted(limits) and limits[0] < limits[2] < limits[3]
    assert limits[-1] == LONGEST_S


def test_outputs_that_take_long_themselves_leave_time_for_prompts() -> None:
    slow = Pace(Curve(((64, 0.05), (1024, 0.1))))
    assert slow.limit_s(64, 0) == slow.limit_s(64, 100_000) == pytest.approx(0.1)


def test_a_given_limit_holds_whatever_waits() -> None:
    pace = Pace(TIMES, max_step_s=0.022)
    assert [pace.begin(24, waiting).prompt_rows_left for waiting in (0, 100_000)] == [1000, 1000]


def test_prompts_fill_a_bucket_that_has_room_for_their_requests() -> None:
    pace = Pace(TIMES, max_step_s=0.022, buckets=((512, 33), (512, 257), (896, 33), (960, 33), (960, 257), (1088, 257)))
    assert pace.begin(10, 0).prompt_rows_left == 960 - 10
    assert Pace(TIMES, max_step_s=0.02, buckets=pace.buckets).begin(10, 0).prompt_rows_left == 896 - 10
    assert Pace(TIMES, max_step_s=0.02, buckets=pace.buckets).begin(40, 0).prompt_rows_left == 512 - 40


def test_what_is_encoded_takes_time_from_prompts() -> None:
    step = Pace(TIMES, IMAGES, max_step_s=0.025).begin(24, 0)
    step.add_rows(100)
    assert step.can_encode(256) and not step.can_encode(2048)
    step.add_image(256)
    assert step.prompt_rows_left == 1024 - 24 - 100
    assert step.can_encode(256), "0.006 s of rows, 0.005 of two images"
    step.add_image(2048)
    assert step.prompt_rows_left == 0
    assert Pace(TIMES, IMAGES, max_step_s=0.001).begin(1, 0).prompt_rows_left == FEWEST_ROWS


@pytest.mark.parametrize("load", USUAL, ids=lambda load: load.name)
def test_the_simulated_h200_serves_as_much_as_the_real_one(load: Load) -> None:
    """All in virtual time, so that figures are the same everywhere."""
    found, (requests_per_s, ttft_ms, *_) = simulate(load, inf, seeds=(0,)), MEASURED[load.name]
    assert found.requests_per_s == pytest.approx(requests_per_s, rel=0.1)
    assert found.ttft_ms == pytest.approx(ttft_ms, rel=0.1)


@pytest.mark.parametrize("load", [load for load in USUAL if load.name in AIMS_MS], ids=lambda load: load.name)
def test_tokens_keep_coming_and_no_less_is_served(load: Load) -> None:
    free, paced = (simulate(load, limit_ms, seeds=(0,)) for limit_ms in (inf, 0))
    assert paced.p99_ms < AIMS_MS[load.name]
    assert paced.longest_ms < free.longest_ms / 3
    assert paced.requests_per_s > 0.98 * free.requests_per_s
    assert paced.ttft_ms < free.ttft_ms


def test_where_nobody_waits_for_a_second_token_steps_have_no_limit() -> None:
    load = next(load for load in USUAL if load.kinds[0].outputs == 1)
    assert simulate(load, 0, seeds=(0,)) == simulate(load, inf, seeds=(0,))

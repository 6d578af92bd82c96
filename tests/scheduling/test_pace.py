"""How long steps with outputs may take: the rules, and loads on a simulated H200."""

from math import inf

import numpy as np
import pytest

from saccade.choice.costs import Curve
from saccade.scheduling.pace import FIRST_TOKEN_S, LONG_STEP_S, MIN_PROMPT_ROWS, Backlog, Pace
from tests.scheduling.paced_loads import AT_RANDOM, MEASURED, USUAL, Load, Simulation, simulate

TIMES = Curve(((64, 0.005), (128, 0.006), (1024, 0.022), (2048, 0.044)))
IMAGES = Curve(((256, 0.003), (2048, 0.02)))
AIMS_MS = {"560x560, 128 out, 32": 12, "1920x1080, 32 out, 16": 60, "text 512, 128 out, 64": 13}
NOTHING = Backlog()


def test_a_short_step_takes_twice_the_time_of_its_outputs_alone() -> None:
    assert Pace(TIMES).limit_s(1, NOTHING) == pytest.approx(0.01)
    assert Pace(TIMES).limit_s(128, NOTHING) == Pace(TIMES).limit_s(128, Backlog(300)) == pytest.approx(0.012)


def test_steps_get_long_when_short_ones_would_delay_first_tokens_too_much() -> None:
    """Short steps leave prompts half of the time."""
    limits = [Pace(TIMES).limit_s(64, Backlog(rows)) for rows in (2048, 22_000, 24_000, 100_000)]
    assert limits == pytest.approx([0.01, 0.01, LONG_STEP_S, LONG_STEP_S])


def test_the_longer_a_prompt_has_waited_the_sooner_steps_get_long() -> None:
    pace = Pace(TIMES)
    assert pace.limit_s(64, Backlog(2048, waited_s=FIRST_TOKEN_S - 0.089)) == pytest.approx(0.01)
    assert pace.limit_s(64, Backlog(2048, waited_s=FIRST_TOKEN_S - 0.087)) == LONG_STEP_S


def test_waiting_images_count_with_the_time_they_take() -> None:
    """20,000 rows take 0.43 s, 8,192 image rows 0.08 s."""
    assert Pace(TIMES, IMAGES).limit_s(64, Backlog(20_000, 4_096)) == pytest.approx(0.01)
    assert Pace(TIMES, IMAGES).limit_s(64, Backlog(20_000, 8_192)) == LONG_STEP_S
    assert Pace(TIMES).limit_s(64, Backlog(20_000, 8_192)) == pytest.approx(0.01), "vision passes were not timed"


def test_while_a_large_image_is_to_be_encoded_a_short_step_takes_somewhat_longer_than_it() -> None:
    """Images of 256, 1,024 and 2,048 rows take 3, 10.3 and 20 ms."""
    backlogs = [Backlog(100, rows, next_image_rows=rows) for rows in (256, 1024, 2048, 8192)]
    limits = [Pace(TIMES, IMAGES).limit_s(64, backlog) for backlog in backlogs]
    assert limits == pytest.approx([0.01, 0.0154, 0.03, LONG_STEP_S], rel=0.01)
    in_parts = Pace(TIMES, IMAGES, num_parts=lambda num_rows: num_rows // 1024)
    assert in_parts.limit_s(64, backlogs[-1]) == pytest.approx(0.015), "a part of 10 ms"
    assert Pace(TIMES).limit_s(64, backlogs[-1]) == pytest.approx(0.01), "vision passes were not timed"


def test_slow_outputs_still_leave_time_for_prompts() -> None:
    slow = Pace(Curve(((64, 0.05), (1024, 0.1))))
    assert slow.limit_s(64, NOTHING) == slow.limit_s(64, Backlog(100_000)) == pytest.approx(0.1)


def test_an_explicit_limit_holds_whatever_the_backlog() -> None:
    pace = Pace(TIMES, max_step_s=0.022)
    assert [pace.begin(24, Backlog(rows)).prompt_rows_left for rows in (0, 100_000)] == [1000, 1000]


def test_prompts_fill_a_bucket_that_has_room_for_their_requests() -> None:
    pace = Pace(TIMES, max_step_s=0.022, buckets=((512, 33), (512, 257), (896, 33), (960, 33), (960, 257), (1088, 257)))
    assert pace.begin(10, NOTHING).prompt_rows_left == 960 - 10
    assert Pace(TIMES, max_step_s=0.02, buckets=pace.buckets).begin(10, NOTHING).prompt_rows_left == 896 - 10
    assert Pace(TIMES, max_step_s=0.02, buckets=pace.buckets).begin(40, NOTHING).prompt_rows_left == 512 - 40


def test_encoding_images_leaves_less_time_for_prompts() -> None:
    step = Pace(TIMES, IMAGES, max_step_s=0.025).begin(24, NOTHING)
    step.add_rows(100)
    assert step.parts_in_time(256, 1) == 1 and step.parts_in_time(2048, 1) == 0
    step.add_image(256)
    assert step.prompt_rows_left == 1024 - 24 - 100
    assert step.parts_in_time(256, 1) == 1, "0.006 s of rows, 0.005 of two images"
    step.add_image(2048)
    assert step.prompt_rows_left == 0
    step.add_rows(-60)
    assert step.prompt_rows_left == 60, "rows that were set aside come back, whatever was encoded meanwhile"
    assert Pace(TIMES, IMAGES, max_step_s=0.001).begin(1, NOTHING).prompt_rows_left == MIN_PROMPT_ROWS


def test_as_many_parts_of_a_large_image_are_encoded_as_there_is_time_for() -> None:
    """An image of 2,048 rows takes 0.02 s, outputs alone 0.005 s."""
    fresh = [Pace(TIMES, IMAGES, max_step_s=limit_s).begin(24, NOTHING) for limit_s in (0.001, 0.012, 0.02, 0.025)]
    assert [step.parts_in_time(2048, 4) for step in fresh] == [1, 1, 3, 4]
    assert [step.parts_in_time(2048, 1) for step in fresh] == [1, 1, 1, 1], "what cannot be divided is encoded whole"
    for step in fresh:
        step.add_rows(40)
    assert [step.parts_in_time(2048, 4) for step in fresh] == [0, 1, 3, 4], "only the first in a step goes beyond it"


def test_passes_that_were_not_timed_take_no_time() -> None:
    step = Pace(TIMES, max_step_s=0.001).begin(24, NOTHING)
    step.add_rows(1)
    assert step.parts_in_time(2048, 4) == 0, "the step is full without them"
    assert Pace(TIMES, max_step_s=0.02).begin(24, NOTHING).parts_in_time(2048, 4) == 4


@pytest.mark.parametrize("load", USUAL, ids=lambda load: load.name)
def test_the_simulated_h200_is_as_fast_as_the_real_one(load: Load) -> None:
    """Virtual time makes the figures the same on every machine."""
    found, (requests_per_s, ttft_ms, *_) = simulate(load, inf, seeds=(0,)), MEASURED[load.name]
    assert found.requests_per_s == pytest.approx(requests_per_s, rel=0.1)
    assert found.ttft_ms == pytest.approx(ttft_ms, rel=0.1)


@pytest.mark.parametrize("load", [load for load in USUAL if load.name in AIMS_MS], ids=lambda load: load.name)
def test_pacing_shortens_gaps_between_tokens_at_equal_throughput(load: Load) -> None:
    free, paced = (simulate(load, limit_ms, seeds=(0,)) for limit_ms in (inf, 0))
    assert paced.p99_ms < AIMS_MS[load.name]
    assert paced.longest_ms < free.longest_ms / 3
    assert paced.requests_per_s > 0.99 * free.requests_per_s
    assert paced.ttft_ms < 0.7 * free.ttft_ms
    assert paced.ttft_p99_ms < 1.4 * free.ttft_p99_ms, "of the first prompts, which come all at once"


@pytest.mark.parametrize("load", [load for load in USUAL if load.name in AIMS_MS], ids=lambda load: load.name)
def test_short_steps_keep_answers_apart_so_that_later_prompts_do_not_come_together(load: Load) -> None:
    free, paced = (Simulation(load, limit_ms).run().waits[load.concurrency :] for limit_ms in (inf, 0))
    assert np.mean(paced) < 0.6 * np.mean(free)
    assert np.percentile(paced, 99) < 0.8 * np.percentile(free, 99)


@pytest.mark.parametrize("limit_ms", [inf, 0], ids=["no limit", "paced"])
def test_short_prompts_do_not_wait_for_long_ones(limit_ms: float) -> None:
    """A prompt of 32,000 tokens takes more than a second alone."""
    load = next(load for load in AT_RANDOM if "32k, at random 90%" in load.name)
    run = Simulation(load, limit_ms, seed=1).run()
    waits = [wait for wait, request in zip(run.waits, run.requests, strict=True) if len(request.prompt_ids) < 1000]
    assert np.mean(waits) < 800, "it would be more than a second if they did"


def test_a_4k_image_beside_chats_does_not_stop_them() -> None:
    """Its pass takes 370 ms; with a part in each step, it delays a token by a quarter of that."""
    load = next(load for load in AT_RANDOM if "3840x2160, at random 70%" in load.name)
    free, paced = (simulate(load, limit_ms, seeds=(0,)) for limit_ms in (inf, 0))
    assert free.longest_ms > 370 and paced.longest_ms < 180
    assert paced.requests_per_s > 0.99 * free.requests_per_s


def test_without_second_tokens_to_wait_for_steps_have_no_limit() -> None:
    load = next(load for load in USUAL if load.kinds[0].outputs == 1)
    assert simulate(load, 0, seeds=(0,)) == simulate(load, inf, seeds=(0,))

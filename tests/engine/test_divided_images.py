"""Images that take longer than a step are encoded in parts, so that answers that are being generated go on."""

from dataclasses import replace

import pytest

from saccade.choice.costs import Curve
from saccade.scheduling.pace import Pace
from saccade.scheduling.request import Request, Status
from saccade.scheduling.step_plan import StepPlan
from saccade.wire.engine_settings import SchedulerSettings
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.update import FinishReason
from tests.engine.simulated import Loop, image, make_request, make_scheduler, with_images

LIMITS = SchedulerSettings(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, encoder_budget_tokens=64)
ROW_S, IMAGE_ROW_S = 0.01, 0.005
TIMES = Curve(((1, ROW_S), (100, 100 * ROW_S))), Curve(((1, IMAGE_ROW_S), (100, 100 * IMAGE_ROW_S)))
# An output and a part of two image rows fit into a step, or two of them if nothing else does.
PACE = Pace(*TIMES, 0.0301, min_prompt_rows=2, num_parts=lambda num_rows: num_rows // 2)


def outputs(count: int) -> SamplingParams:
    return SamplingParams(ignore_eos=True, max_tokens=count, seed=0)


def with_image(name: str, length: int = 10, *, text: int = 1, digest: str = "", priority: int = 0) -> Request:
    span = image(text, length, (digest or name).encode())
    prompt = with_images(text + length + 2, span)
    return make_request(name, prompt, spans=(span,), params=outputs(2), priority=priority)


def chunks(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(chunk.request_id, chunk.start, chunk.count) for chunk in plan.chunks]


def parts(plan: StepPlan) -> list[tuple[str, int, int, int]]:
    return [(item.request_id, item.first_part, item.end_part, item.num_parts) for item in plan.encode]


@pytest.fixture
def loop() -> Loop:
    """`answer` is being generated."""
    loop = Loop(make_scheduler(LIMITS))
    loop.scheduler.pace = PACE
    loop.add(make_request("answer", with_images(3), params=outputs(30)))
    loop.step()
    return loop


def test_every_step_encodes_a_part_and_the_answer_goes_on(loop: Loop) -> None:
    loop.add(with_image("b"))
    plans = [loop.step() for _ in range(4)]
    assert [parts(plan) for plan in plans] == [[("b", 0, 2, 5)], [("b", 2, 4, 5)], [("b", 4, 5, 5)], []]
    assert all(("answer", 3 + i, 1) in chunks(plan) for i, plan in enumerate(plans))
    assert [chunks(plan)[1:] for plan in plans[:3]] == [[("b", 0, 1)], [], [("b", 1, 2)]], "no row before the last part"
    loop.drain()
    loop.check_ended()


def test_an_image_at_the_start_of_a_prompt_has_a_running_request(loop: Loop) -> None:
    loop.add(with_image("b", text=0))
    assert chunks(loop.step())[1:] == []
    assert loop.requests["b"].status is Status.RUNNING
    loop.drain()
    loop.check_ended()


def test_without_answers_it_is_encoded_at_once() -> None:
    loop = Loop(make_scheduler(LIMITS))
    loop.scheduler.pace = PACE
    loop.add(with_image("b"))
    assert (parts(plan := loop.step()), chunks(plan)) == ([("b", 0, 1, 1)], [("b", 0, 13)])


def test_the_rest_is_encoded_at_once_when_answers_have_ended(loop: Loop) -> None:
    loop.add(with_image("b"))
    loop.step()
    loop.abort("answer")
    assert (parts(plan := loop.step()), chunks(plan)) == ([("b", 2, 5, 5)], [("b", 1, 12)])


def test_requests_with_the_same_image_wait_for_it_and_share_it(loop: Loop) -> None:
    loop.add(with_image("b", digest="x"))
    loop.add(with_image("c", digest="x"))
    plans = [loop.step() for _ in range(8)]
    assert {item.request_id for plan in plans for item in plan.encode} == {"b"}
    loop.drain()
    loop.check_ended()


def test_other_images_wait_and_text_does_not(loop: Loop) -> None:
    loop.add(with_image("b"))
    loop.add(with_image("c", 4))
    loop.add(make_request("text", with_images(2), params=outputs(2)))
    plans = [loop.step() for _ in range(11)]
    assert [parts(plan)[0][:2] for plan in plans if plan.encode] == [("b", 0), ("b", 2), ("b", 4), ("c", 0), ("c", 1)]
    assert "text" in [name for name, *_ in chunks(plans[2])], "it starts before the images that came first are encoded"
    loop.drain()
    loop.check_ended()


def test_whoever_began_an_image_ends_it(loop: Loop) -> None:
    loop.add(with_image("late", digest="x", priority=1))
    loop.step()
    loop.add(with_image("urgent", digest="x", priority=-1))
    plans = [loop.step() for _ in range(3)]
    assert [item.request_id for plan in plans for item in plan.encode] == ["late", "late"]


@pytest.mark.parametrize("is_preempted", [False, True])
def test_a_request_that_stops_halfway_leaves_nothing_behind(loop: Loop, is_preempted: bool) -> None:
    """Whoever wants the image later encodes it from the first part on."""
    loop.add(with_image("b", digest="x"))
    loop.step()
    if is_preempted:
        loop.scheduler._preempt(loop.requests["b"])
    else:
        loop.abort("b")
        loop.add(with_image("c", digest="x"))
    loop.scheduler.check()
    assert loop.scheduler.stats().encoder_usage == 0
    assert [one[1:] for one in parts(loop.step())] == [(0, 2, 5)]
    loop.drain()
    loop.check_ended()


def test_an_image_that_fails_with_its_last_part_ends_its_request_alone(loop: Loop) -> None:
    loop.add(with_image("b", digest="x"))
    loop.add(with_image("c", digest="x"))
    loop.step()
    loop.step()
    plan = loop.scheduler.plan(0.0)
    failing = [i for i, chunk in enumerate(plan.chunks) if chunk.request_id == "b"]
    assert plan.encode[-1].is_last and failing
    loop.flights.append((plan, loop.device.run(plan, loop.requests, ["b"])))
    loop.land()
    loop.drain()
    assert loop.finish_reason("b") is FinishReason.ERROR and loop.finish_reason("c") is FinishReason.LENGTH
    loop.check_ended()


def test_a_request_that_comes_first_gets_its_image_even_if_another_has_begun(loop: Loop) -> None:
    """There is one set of buffers, so the image that was begun is finished first."""
    loop.add(with_image("late", priority=1))
    loop.step()
    loop.add(with_image("urgent", 4, priority=-1))
    plans = [loop.step() for _ in range(4)]
    assert [item.request_id for plan in plans for item in plan.encode] == ["late", "late", "urgent"]
    loop.drain()
    loop.check_ended()


def test_other_images_do_not_wait_for_a_long_prompt_because_of_an_image_that_was_begun(loop: Loop) -> None:
    """Short prompts go beside the long one, and the image that was begun does, too."""
    loop.add(with_image("begun", priority=1))
    loop.step()
    loop.add(make_request("long", with_images(60), params=outputs(2)))
    loop.add(with_image("short", 4))
    plans = [loop.step() for _ in range(9)]
    assert [item.request_id for plan in plans for item in plan.encode][:3] == ["begun", "begun", "short"]
    assert loop.requests["long"].num_left > 20
    loop.drain()
    loop.check_ended()


def test_new_requests_wait_until_the_rows_of_an_image_fit_beside_the_outputs() -> None:
    """They must be computed in one piece. Others start while its parts are encoded, but not once it lacks only rows."""
    loop = Loop(make_scheduler(replace(LIMITS, max_num_batched_tokens=14)))
    loop.scheduler.pace = PACE
    for i in range(5):
        loop.add(make_request(f"old{i}", with_images(3), params=outputs(6 + 3 * i)))
    for _ in range(3):
        loop.step()
    span = replace(image(1, 10, b"whole"), is_whole=True)
    loop.add(make_request("whole", with_images(13, span), spans=(span,), params=outputs(2)))
    seen = []
    for i in range(40):
        loop.add(make_request(f"new{i}", with_images(3), params=outputs(12)))
        seen += parts(loop.step())
    assert len(seen) > 1 and loop.requests["whole"].status is Status.FINISHED
    loop.drain()
    loop.check_ended()


def test_small_images_are_not_divided(loop: Loop) -> None:
    loop.scheduler.pace = replace(PACE, num_parts=lambda num_rows: 1)
    loop.add(with_image("b"))
    assert parts(loop.step()) == [("b", 0, 1, 1)]

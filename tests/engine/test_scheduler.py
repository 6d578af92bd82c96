"""The rules of the scheduler, one by one. `test_scheduler_machine` tests them all at once."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.cache.prefix import Span
from saccade.choice.costs import Curve
from saccade.errors import CapacityError, ConfigError, RequestError
from saccade.scheduling import request as request_module
from saccade.scheduling import request_checks
from saccade.scheduling.pace import Pace
from saccade.scheduling.request import Request, Status
from saccade.scheduling.scheduler import Scheduler
from saccade.scheduling.step_plan import RowError, StepPlan
from saccade.wire.engine_settings import SchedulerSettings
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.update import Finish, FinishReason, Update
from tests.engine.counting import num_opcodes
from tests.engine.simulated import EOS, Loop, image, make_request, make_scheduler, oracle, with_images

LIMITS = SchedulerSettings(max_num_seqs=8, max_num_batched_tokens=32, max_model_len=64, encoder_budget_tokens=16)
ENDLESS = SamplingParams(ignore_eos=True, max_tokens=None, seed=0)


def make_loop(limits: SchedulerSettings = LIMITS, **sizes: Any) -> Loop:
    return Loop(make_scheduler(limits, **sizes))


def outputs(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(ignore_eos=True, max_tokens=count, seed=0, **more)


def rows(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(chunk.request_id, chunk.start, chunk.count) for chunk in plan.chunks]


def text(length: int, first: int = 10) -> list[int]:
    return [first + i % 20 for i in range(length)]


def pace(max_step_s: float, min_prompt_rows: int = 2) -> Pace:
    """A pace where a row takes 10 ms and an image row 5."""
    times = Curve(((1, 0.01), (100, 1.0))), Curve(((1, 0.005), (100, 0.5)))
    return Pace(*times, max_step_s, min_prompt_rows=min_prompt_rows)


class TestPace:
    def test_prompt_chunks_are_shorter_in_steps_with_outputs(self) -> None:
        loop = make_loop(replace(LIMITS, max_num_batched_tokens=32))
        loop.scheduler.pace = pace(0.0601)
        loop.add(make_request("a", text(12), params=outputs(9)))
        assert rows(loop.step()) == [("a", 0, 12)], "a step without outputs has no limit"
        loop.add(make_request("b", text(14, 11), params=outputs(2)))
        loop.add(make_request("c", text(3, 12), params=outputs(2)))
        assert rows(loop.step()) == [("a", 12, 1), ("b", 0, 5)]
        assert rows(loop.step()) == [("a", 13, 1), ("b", 5, 5)]
        assert rows(loop.step()) == [("a", 14, 1), ("b", 10, 4), ("c", 0, 1)]
        assert rows(loop.step()) == [("a", 15, 1), ("b", 14, 1), ("c", 1, 2)]

    def test_prompts_make_progress_even_in_the_shortest_steps(self) -> None:
        loop = make_loop(replace(LIMITS, max_num_batched_tokens=32))
        loop.scheduler.pace = pace(0.001)
        loop.add(make_request("a", text(3), params=outputs(9)))
        loop.step()
        loop.add(make_request("b", text(5, 11), params=outputs(1)))
        assert [rows(loop.step())[1:] for _ in range(3)] == [[("b", 0, 2)], [("b", 2, 2)], [("b", 4, 1)]]

    def test_fewer_images_are_encoded_in_steps_with_outputs(self) -> None:
        """A step has time for an output and 11 rows. Two image rows take as long as a row."""
        loop = make_loop(replace(LIMITS, max_num_batched_tokens=64, encoder_budget_tokens=64))
        loop.add(make_request("a", text(3), params=outputs(9)))
        loop.step()
        loop.scheduler.pace = pace(0.1201)
        for name, length in ((b"x", 4), (b"y", 10), (b"z", 12)):
            span = image(1, length, name)
            loop.add(make_request(name.decode(), with_images(length + 1, span), spans=(span,), params=outputs(1)))
        plans = [loop.step() for _ in range(3)]
        assert [[item.request_id for item in plan.encode] for plan in plans] == [["x"], ["y"], ["z"]]
        assert [rows(plan)[1:] for plan in plans] == [
            [("x", 0, 5), ("y", 0, 1), ("z", 0, 1)],  # there is time for rows of y and z, but not to encode them
            [("y", 1, 6)],  # encoding y takes the time of 5 rows
            [("y", 7, 4), ("z", 1, 1)],  # encoding z takes the time of 6 rows
        ]

    def test_an_image_longer_than_a_step_is_encoded_at_the_start_of_one(self) -> None:
        loop = make_loop(replace(LIMITS, max_num_batched_tokens=64, encoder_budget_tokens=64))
        loop.add(make_request("a", text(3), params=outputs(9)))
        loop.step()
        loop.scheduler.pace = pace(0.0601)
        span = image(2, 20)
        loop.add(make_request("b", with_images(24, span), spans=(span,), params=outputs(1)))
        plans = [loop.step() for _ in range(4)]
        assert [len(plan.encode) for plan in plans] == [1, 0, 0, 0]
        assert [rows(plan)[1:] for plan in plans] == [[("b", 0, 3)], [("b", 3, 5)], [("b", 8, 5)], [("b", 13, 5)]]

    def test_an_image_after_the_end_of_a_chunk_is_not_encoded_yet(self) -> None:
        """Encoding the first image leaves no time for the rows up to the second."""
        loop = make_loop(replace(LIMITS, max_num_batched_tokens=64, encoder_budget_tokens=64))
        loop.add(make_request("a", text(3), params=outputs(9)))
        loop.step()
        loop.scheduler.pace = pace(0.1001)
        spans = (image(1, 6, b"x"), image(8, 1, b"y", media_idx=1))
        loop.add(make_request("b", with_images(12, *spans), spans=spans, params=outputs(1)))
        plans = [loop.step() for _ in range(2)]
        assert [[item.media_idx for item in plan.encode] for plan in plans] == [[0], [1]]
        assert [rows(plan)[1:] for plan in plans] == [[("b", 0, 6)], [("b", 6, 6)]]

    def test_rows_that_must_be_computed_in_one_piece_ignore_the_pace(self) -> None:
        loop = make_loop(replace(LIMITS, max_num_batched_tokens=32))
        loop.scheduler.pace = pace(0.0501)
        loop.add(make_request("a", text(3), params=outputs(9)))
        loop.step()
        span = image(1, 9, is_whole=True)
        loop.add(make_request("b", with_images(12, span), spans=(span,), params=outputs(1)))
        assert [rows(loop.step())[1:] for _ in range(3)] == [[("b", 0, 1)], [("b", 1, 9)], [("b", 10, 2)]]

    @given(st.lists(st.floats(1e-4, 1), min_size=1, max_size=8), st.floats(0, 4))
    def test_rows_within_a_time_are_as_many_as_possible(self, steps: list[float], seconds: float) -> None:
        points = tuple((8 * (i + 1), sum(steps[: i + 1])) for i in range(len(steps)))
        curve = Curve(points)
        found = curve.within(seconds)
        assert found == 0 or curve.at(found) <= seconds * (1 + 1e-9)
        assert curve.at(found + 1) > seconds * (1 - 1e-9)


class TestPolicy:
    def test_outputs_come_first_then_started_prompts_then_new_requests(self) -> None:
        loop = make_loop(replace(LIMITS, max_num_batched_tokens=16, prefill_chunk_tokens=10))
        loop.add(make_request("a", text(3, 10), params=outputs(9)))
        loop.step()
        loop.add(make_request("b", text(14, 11), params=outputs(9)))
        assert rows(loop.step()) == [("a", 3, 1), ("b", 0, 10)]
        loop.add(make_request("c", text(20, 12), params=outputs(9)))
        assert rows(loop.step()) == [("a", 4, 1), ("b", 10, 4), ("c", 0, 10)]
        assert rows(loop.step()) == [("a", 5, 1), ("b", 14, 1), ("c", 10, 10)]

    def test_a_chunk_ends_at_the_budget(self) -> None:
        loop = make_loop(replace(LIMITS, max_num_batched_tokens=8))
        loop.add(make_request("a", text(20)))
        plans = [loop.step() for _ in range(3)]
        assert [rows(plan) for plan in plans] == [[("a", 0, 8)], [("a", 8, 8)], [("a", 16, 4)]]
        assert [plan.chunks[0].wants_logits for plan in plans] == [False, False, True]

    def test_order_is_priority_then_fair_turns_then_arrival(self) -> None:
        loop = make_loop(replace(LIMITS, max_num_seqs=1, max_num_batched_tokens=16))
        for name, priority, arrival in [("a", 1, 0.0), ("b", 0, 1.0), ("c", 0, 1.0), ("d", 0, 2.0), ("e", -1, 9.0)]:
            loop.add(make_request(name, text(4), priority=priority, arrival=arrival, params=outputs(1)))
        loop.add(make_request("f", text(4), arrival=0.5, params=outputs(1), tenant="other"))
        assert [loop.step().chunks[0].request_id for _ in range(6)] == ["e", "f", "b", "c", "d", "a"]

    def test_no_request_overtakes_the_first_waiting_one(self) -> None:
        loop = make_loop(num_blocks=9, has_prefix=False)
        loop.add(make_request("a", text(16), params=outputs(3)))
        loop.step()
        loop.add(make_request("long", text(20)))
        loop.add(make_request("short", text(4)))
        assert rows(loop.step()) == [("a", 16, 1)]
        loop.step()
        assert [chunk.request_id for chunk in loop.step().chunks] == ["long", "short"]

    def test_a_new_request_leaves_a_block_to_each_running_one(self) -> None:
        loop = make_loop(num_blocks=8, has_prefix=False)
        loop.add(make_request("a", text(8), params=outputs(6)))
        loop.step()
        loop.add(make_request("b", text(16), params=outputs(1)))
        assert rows(loop.step()) == [("a", 8, 1)]
        loop.drain(is_pipelined=False)
        loop.check_ended()
        assert loop.scheduler.num_preemptions == 0

    def test_a_prompt_has_all_its_blocks_from_the_start(self) -> None:
        loop = make_loop(replace(LIMITS, prefill_chunk_tokens=4))
        loop.add(make_request("a", text(18)))
        plan = loop.step()
        assert plan.chunks[0].count == 4
        assert len(plan.chunks[0].blocks) == 5

    def test_plans_are_plain_data(self) -> None:
        def plans() -> list[StepPlan]:
            loop = make_loop()
            span = image(2, 5)
            loop.add(make_request("a", with_images(12, span), spans=(span,), params=outputs(2)))
            loop.add(make_request("b", text(9), params=outputs(3)))
            loop.drain()
            return loop.plans

        assert plans() == plans()
        assert "request_id='a'" in repr(plans()[0])
        assert hash(plans()[0]) == hash(plans()[0])


class TestLimits:
    def test_requests_that_could_never_run_are_refused(self) -> None:
        scheduler = make_loop(num_blocks=9, encoder_rows=20).scheduler
        span = image(0, 17)
        whole = image(0, 20, is_whole=True)
        cases = [
            (make_request("a", ()), "the prompt is empty; at least one token is needed"),
            (
                make_request("a", text(64)),
                "prompt has 64 tokens; this model's maximum context length is 64 tokens, the answer included "
                "(--max-model-len)",
            ),
            (
                make_request("a", text(33)),
                "prompt has 33 tokens; the KV cache has room for 32 (--gpu-memory-utilization)",
            ),
            (
                make_request("a", with_images(20, span), spans=(span,)),
                "image or video 0 has 17 tokens; the encoder cache has room for 16 (--encoder-cache-tokens)",
            ),
        ]
        for request, message in cases:
            with pytest.raises(RequestError) as caught:
                scheduler.add(request)
            assert str(caught.value) == message
            assert caught.value.param == "prompt"
        scheduler = make_loop(replace(LIMITS, max_num_batched_tokens=19)).scheduler
        with pytest.raises(RequestError, match=r"one step takes 19 \(--max-num-batched-tokens\)"):
            scheduler.add(make_request("a", with_images(20, whole), spans=(whole,)))
        assert scheduler.is_idle

    def test_ids_of_live_requests_differ(self) -> None:
        loop = make_loop()
        loop.add(make_request("a", text(4), params=outputs(5, n=2)))
        for taken in ("a", "a:1"):
            with pytest.raises(RequestError, match="ids must be unique"):
                loop.scheduler.add(make_request(taken, text(4)))
        loop.scheduler.abort("a")
        loop.scheduler.add(make_request("a", text(4)))

    def test_the_queue_is_limited_by_requests(self) -> None:
        limits = replace(LIMITS, max_num_seqs=2, max_queued_requests=3, retry_after_s=2.5)
        scheduler = make_loop(limits).scheduler
        for name in "abcd":  # the next step starts two of them
            scheduler.add(make_request(name, text(4)))
        with pytest.raises(CapacityError, match=r"4 requests wait; the limit is 3 \(--max-queued-requests\)") as caught:
            scheduler.add(make_request("e", text(4), params=outputs(1, n=2)))
        assert caught.value.retry_after_s == 2.5
        scheduler.add(make_request("e", text(4)))
        scheduler.plan(0.0)
        with pytest.raises(CapacityError, match="3 requests wait; the limit is 3"):
            scheduler.add(make_request("f", text(4)))
        scheduler.check()

    def test_the_queue_is_limited_by_tokens_unless_it_is_empty(self) -> None:
        scheduler = make_loop(replace(LIMITS, max_queued_tokens=10)).scheduler
        scheduler.add(make_request("a", text(30)))
        with pytest.raises(CapacityError, match="30 prompt tokens wait and 1 would join them; the limit is 10"):
            scheduler.add(make_request("b", text(1)))
        scheduler.plan(0.0)
        scheduler.add(make_request("b", text(1)))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"max_queued_requests": 0}, r"max_queued_requests is 0; it must be at least 1 \(--max-queued-requests\)"),
            ({"max_model_len": 1}, "at least 2"),
            ({"max_num_seqs": 33}, "33 running requests need a row each"),
        ],
    )
    def test_settings_are_checked(self, change: dict[str, int], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            replace(LIMITS, **change)

    def test_outputs_end_at_max_model_len(self) -> None:
        loop = make_loop(replace(LIMITS, max_model_len=20))
        loop.add(make_request("a", text(15), params=ENDLESS))
        loop.drain()
        assert len(loop.outputs("a")) == 5
        assert loop.finish_reason("a") == "length"
        loop.check_ended()


class TestEnding:
    def test_stop_tokens_end_a_request_and_say_which(self) -> None:
        request = make_request("a", text(5), params=SamplingParams(seed=1, max_tokens=50, ignore_eos=True))
        tokens = oracle(request, 64)
        stop = tokens[6]
        assert stop not in tokens[:6]
        loop = make_loop()
        loop.add(make_request("a", text(5), params=replace(request.params, stop_token_ids=[stop])))
        loop.drain()
        assert loop.outputs("a") == tokens[:7]
        assert loop.events["a"][-1].finish == Finish(FinishReason.STOP, stop)

    def test_an_end_token_is_ignored_before_min_tokens(self) -> None:
        scheduler = make_scheduler(LIMITS)
        scheduler.add(make_request("a", text(5), params=SamplingParams(min_tokens=2, max_tokens=9)))
        assert scheduler.commit(scheduler.plan(0), {"a": [EOS]}) == (Update("a", (EOS,)),)
        assert scheduler.commit(scheduler.plan(0), {"a": [EOS]}) == (
            Update("a", (EOS,), finish=Finish(FinishReason.STOP)),
        )
        assert scheduler.is_idle

    def test_a_stop_string_ends_one_request(self) -> None:
        loop = make_loop()
        loop.add(make_request("a", text(5), params=outputs(9)))
        loop.step()
        assert loop.scheduler.stop("a", "###") == (Update("a", (), finish=Finish(FinishReason.STOP, "###")),)
        assert loop.scheduler.stop("a", "###") == ()
        assert loop.scheduler.is_idle

    def test_deadlines_end_waiting_and_running_requests(self) -> None:
        loop = make_loop(replace(LIMITS, max_num_seqs=2))
        loop.add(make_request("runs", text(5), params=outputs(30), deadline=5.0))
        loop.add(make_request("free", text(5), params=outputs(30)))
        loop.add(make_request("waits", text(5), deadline=4.0))
        for name, deadline in (("waits", 4.0), ("runs", 5.0)):
            loop.now = deadline - 0.1
            assert loop.step().updates == ()
            loop.now = deadline
            (event,) = loop.step().updates
            assert event.request_id == name
            assert event.finish == Finish(FinishReason.DEADLINE, "the deadline passed 0.000 s ago")
        assert not any(event.token_ids for event in loop.events["waits"]), "it never ran"
        loop.drain()
        assert loop.finish_reason("free") == "length"

    def test_an_error_ends_only_its_own_request(self) -> None:
        loop = make_loop()
        for name in "abc":
            loop.add(make_request(name, text(5, ord(name)), params=outputs(6)))
        loop.step()
        loop.step(failing=[1])
        loop.drain()
        loop.check_ended()
        assert loop.events["b"][-1].finish == Finish(FinishReason.ERROR, "injected")
        assert [loop.finish_reason(name) for name in "ac"] == ["length", "length"]

    def test_aborting_an_ended_or_unknown_request_does_nothing(self) -> None:
        loop = make_loop()
        loop.add(make_request("a", text(5)))
        assert loop.scheduler.abort("a") == (Update("a", (), finish=Finish(FinishReason.ABORT)),)
        assert loop.scheduler.abort("a") == loop.scheduler.abort("nobody") == ()


class TestPrefixCache:
    def test_a_second_request_computes_only_what_differs(self) -> None:
        loop = make_loop()
        loop.add(make_request("a", text(13), params=outputs(1)))
        loop.step()
        loop.add(make_request("b", text(11) + [1, 2, 3], params=outputs(1)))
        assert rows(loop.step()) == [("b", 8, 6)]
        assert loop.requests["b"].num_cached_tokens == 8
        stats = loop.scheduler.stats()
        assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (27, 8)
        loop.check_ended()

    def test_the_last_token_is_always_computed(self) -> None:
        loop = make_loop()
        for name in "ab":
            loop.add(make_request(name, text(12), params=outputs(1)))
            loop.step()
        assert rows(loop.plans[1]) == [("b", 8, 4)]

    def test_outputs_are_reused_by_the_next_turn(self) -> None:
        loop = make_loop()
        loop.add(make_request("a", text(6), params=outputs(8)))
        loop.drain()
        turn = text(6) + loop.outputs("a")
        loop.add(make_request("b", [*turn, 1, 2], params=outputs(1)))
        # The row of the last output was never computed: 13 of 14 rows are in the cache, 12 of them in full blocks.
        assert rows(loop.step()) == [("b", 12, 4)]

    @pytest.mark.parametrize("salt", [None, "", "other"])
    def test_salts_keep_prompts_apart(self, salt: str | None) -> None:
        loop = make_loop()
        loop.add(make_request("a", text(12), salt="mine", params=outputs(1)))
        loop.step()
        loop.add(make_request("b", text(12), salt=salt, params=outputs(1)))
        assert rows(loop.step()) == [("b", 0, 12)]

    def test_prompts_with_other_images_are_not_shared(self) -> None:
        loop = make_loop()
        for name, digest in [("a", b"x"), ("b", b"y"), ("c", b"x")]:
            span = image(1, 10, digest)
            loop.add(make_request(name, with_images(14, span), spans=(span,), params=outputs(1)))
            loop.step()
        assert [rows(plan)[0][1] for plan in loop.plans] == [0, 0, 12]
        assert [len(plan.encode) for plan in loop.plans] == [1, 1, 0]

    def test_prompt_scores_bypass_the_cache_once(self) -> None:
        loop = make_loop()
        loop.add(make_request("a", text(12), params=outputs(1)))
        loop.step()
        loop.add(make_request("b", text(12), params=outputs(3, prompt_logprobs=1)))
        plan = loop.step()
        assert rows(plan) == [("b", 0, 12)]
        assert plan.chunks[0].wants_all_logits
        assert not loop.step().chunks[0].wants_all_logits
        loop.scheduler._preempt(loop.requests["b"])
        plan = loop.step()
        assert rows(plan) == [("b", 12, 2)]
        assert not plan.chunks[0].wants_all_logits

    def test_rows_in_flight_are_not_shared(self) -> None:
        """A step in flight may have written its rows, but they cannot be shared yet."""
        loop = make_loop()
        loop.add(make_request("a", text(12), params=outputs(9)))
        loop.launch()
        loop.add(make_request("b", text(12), params=outputs(9)))
        assert rows(loop.launch()) == [("a", 12, 1), ("b", 0, 12)]
        loop.land()
        loop.land()
        loop.drain()
        loop.check_ended()


class TestImages:
    def test_an_image_is_encoded_once_for_all_requests_with_it(self) -> None:
        loop = make_loop(has_prefix=False)
        span = image(2, 6)
        for name in "ab":
            loop.add(make_request(name, with_images(12, span), spans=(span,), params=outputs(1)))
        plan = loop.step()
        assert [(item.request_id, item.num_rows, len(item.pages)) for item in plan.encode] == [("a", 6, 2)]
        assert plan.chunks[0].media == plan.chunks[1].media
        loop.add(make_request("c", with_images(12, span), spans=(span,), params=outputs(1), salt="s"))
        loop.add(make_request("d", with_images(12, span), spans=(span,), params=outputs(1)))
        assert [item.request_id for item in loop.step().encode] == ["c"]
        assert loop.scheduler.stats().encoder_usage == 0

    def test_a_chunk_ends_before_an_image_that_exceeds_the_budget(self) -> None:
        loop = make_loop(replace(LIMITS, encoder_budget_tokens=10))
        spans = (image(1, 6, b"x"), image(9, 6, b"y", media_idx=1))
        loop.add(make_request("a", with_images(20, *spans), spans=spans, params=outputs(1)))
        first, second = loop.step(), loop.step()
        assert rows(first) + rows(second) == [("a", 0, 9), ("a", 9, 11)]
        assert [[item.media_idx for item in plan.encode] for plan in (first, second)] == [[0], [1]]

    def test_an_image_larger_than_the_budget_is_encoded_alone(self) -> None:
        loop = make_loop(replace(LIMITS, encoder_budget_tokens=4))
        for name in "ab":
            span = image(0, 9, name.encode())
            loop.add(make_request(name, with_images(12, span), spans=(span,), params=outputs(1)))
        assert [item.request_id for item in loop.step().encode] == ["a"]
        assert [item.request_id for item in loop.step().encode] == ["b"]
        loop.check_ended()

    def test_chunks_may_divide_an_image_and_name_its_rows(self) -> None:
        loop = make_loop(replace(LIMITS, prefill_chunk_tokens=5))
        span = image(3, 9)
        loop.add(make_request("a", with_images(14, span), spans=(span,), params=outputs(1)))
        plans = [loop.step() for _ in range(3)]
        media = [chunk.media for plan in plans for chunk in plan.chunks]
        assert [(m.start, m.count, m.first_row) for (m,) in media] == [(3, 2, 0), (5, 5, 2), (10, 2, 7)]
        assert [len(plan.encode) for plan in plans] == [1, 0, 0]

    def test_rows_that_attend_to_each_other_are_not_divided(self) -> None:
        loop = make_loop(replace(LIMITS, prefill_chunk_tokens=5, max_num_batched_tokens=16))
        span = image(3, 9, is_whole=True)
        loop.add(make_request("a", with_images(14, span), spans=(span,), params=outputs(1)))
        assert [rows(loop.step()) for _ in range(3)] == [[("a", 0, 3)], [("a", 3, 9)], [("a", 12, 2)]]

    def test_after_a_prefix_hit_inside_an_undivided_image_its_rest_stays_whole(self) -> None:
        loop = make_loop(replace(LIMITS, prefill_chunk_tokens=2))
        span = image(1, 12, is_whole=True)
        for name, tail in [("a", [1]), ("b", [2])]:
            prompt = with_images(13, span) + tail
            loop.add(make_request(name, prompt, spans=(span,), params=outputs(1)))
            loop.drain()
        loop.requests["c"] = make_request("c", with_images(13, span), spans=(span,), params=outputs(1))
        loop.events["c"] = []
        loop.scheduler.add(loop.requests["c"])
        plan = loop.step()
        assert rows(plan) == [("c", 12, 1)]
        assert plan.chunks[0].media[0].first_row == 11
        loop.check_ended()

    def test_two_prompts_of_many_images_do_not_deadlock(self) -> None:
        """There is room for two images. Two requests have four each, and chunks end inside them."""
        loop = make_loop(
            replace(LIMITS, prefill_chunk_tokens=5, max_num_batched_tokens=10), encoder_rows=20, page_rows=4
        )
        for name in "ab":
            spans = tuple(image(8 * i, 8, f"{name}{i}".encode(), media_idx=i) for i in range(4))
            loop.add(make_request(name, with_images(34, *spans), spans=spans, params=outputs(2)))
        assert loop.drain() < 60
        loop.check_ended()

    def test_a_request_that_read_failed_media_rows_starts_again(self) -> None:
        loop = make_loop(has_prefix=False)
        span = image(2, 6)
        for name in "ab":
            loop.add(make_request(name, with_images(12, span), spans=(span,), params=outputs(4)))
        loop.launch(failing=[0])
        assert loop.launch().chunks[1].is_pending_input
        loop.land()
        assert loop.requests["b"].status is Status.PREEMPTED
        assert not loop.launch().chunks, "b still has rows in flight, which will be ignored"
        loop.land()
        assert [item.request_id for item in loop.step().encode] == ["b"]
        loop.drain()
        loop.check_ended()
        assert [loop.finish_reason(name) for name in "ab"] == ["error", "length"]


class TestPreemption:
    def test_the_last_in_order_is_preempted_and_loses_no_outputs(self) -> None:
        loop = make_loop(num_blocks=9)
        for name in "ab":
            loop.add(make_request(name, text(8, ord(name)), params=outputs(18)))
        loop.drain(is_pipelined=False)
        assert [plan.preempted for plan in loop.plans if plan.preempted] == [("b",)]
        assert loop.requests["b"].num_preemptions == 1
        loop.check_ended()

    def test_a_better_priority_is_not_preempted(self) -> None:
        loop = make_loop(num_blocks=9)
        loop.add(make_request("late", text(8, 20), params=outputs(18), arrival=1.0, priority=-1))
        loop.add(make_request("early", text(8, 21), params=outputs(18), arrival=0.0))
        loop.drain(is_pipelined=False)
        assert {name for plan in loop.plans for name in plan.preempted} == {"early"}
        loop.check_ended()

    def test_a_request_that_does_not_fit_alone_ends_with_an_error(self) -> None:
        loop = make_loop(num_blocks=4)
        loop.add(make_request("a", text(8), params=ENDLESS))
        loop.drain()
        assert loop.finish_reason("a") == "error"
        assert len(loop.outputs("a")) == 5  # 12 slots hold 8 + 4 tokens; the fifth output is sampled without one
        message = "the request needs room for 13 tokens; the KV cache has room for 12 (--gpu-memory-utilization)"
        assert loop.events["a"][-1].finish == Finish(FinishReason.ERROR, message)

    def test_a_preempted_request_that_outgrew_the_cache_ends_with_an_error(self) -> None:
        loop = make_loop(num_blocks=4, has_prefix=False)
        loop.add(make_request("a", text(8), params=ENDLESS))
        while len(loop.outputs("a")) < 5:
            loop.step()
        loop.scheduler._preempt(loop.requests["a"])
        loop.drain()
        assert loop.finish_reason("a") == "error"

    def test_blocks_in_flight_are_not_reused_before_the_commit(self) -> None:
        """Plan k + 1 preempts a request whose rows are in plan k, so its blocks are free only after that commit."""
        loop = make_loop(num_blocks=5, has_prefix=False)
        for name in "ab":
            loop.add(make_request(name, text(4, ord(name)), params=outputs(9)))
        while not loop.launch().preempted:
            if len(loop.flights) == 2:
                loop.land()
        assert loop.plans[-1].preempted == ("b",)
        assert loop.scheduler.resources.pool.num_free == 0
        loop.land()
        assert loop.scheduler.resources.pool.num_free == 2
        while loop.flights:
            loop.land()
        loop.drain()
        loop.check_ended()
        assert [loop.finish_reason(name) for name in "ab"] == ["length", "length"]

    def test_nobody_else_is_preempted_while_blocks_are_about_to_be_freed(self) -> None:
        loop = make_loop(num_blocks=7, has_prefix=False)
        for name in "abc":
            loop.add(make_request(name, text(4, ord(name)), params=outputs(9)))
        while not loop.launch().preempted:
            if len(loop.flights) == 2:
                loop.land()
        assert loop.plans[-1].preempted == ("c",)
        while loop.flights:
            loop.land()
        loop.drain()
        loop.check_ended()

    def test_a_partly_computed_prompt_can_be_preempted(self) -> None:
        loop = make_loop(replace(LIMITS, prefill_chunk_tokens=3), num_blocks=9, has_prefix=False)
        loop.add(make_request("a", text(3), params=outputs(9)))
        loop.step()
        loop.add(make_request("b", text(24), params=outputs(2)))
        plans = [loop.step() for _ in range(7)]
        assert [plan.preempted for plan in plans if plan.preempted] == [("b",)]
        loop.drain()
        loop.check_ended()

    def test_a_full_cache_is_no_error_while_blocks_are_about_to_be_freed(self) -> None:
        loop = make_loop(num_blocks=5, has_prefix=False)
        loop.add(make_request("a", text(15), params=outputs(2)))
        loop.launch()
        loop.abort("a")
        loop.add(make_request("b", text(16), params=outputs(1)))
        assert loop.launch() == StepPlan(1)
        loop.land()
        assert rows(loop.step()) == [("b", 0, 16)]
        loop.check_ended()

    @pytest.mark.parametrize("is_pipelined", [False, True])
    def test_the_number_of_steps_is_bounded(self, is_pipelined: bool) -> None:
        """The first request in order is never preempted and makes progress in every step (in every second one, if a
        step is planned before blocks are freed). So all requests take no longer than one after the other."""
        rng = random.Random(5)
        num_preemptions = 0
        for _ in range(10):
            loop = make_loop(replace(LIMITS, prefill_chunk_tokens=6), num_blocks=11, has_prefix=False)
            bound = 0
            for i in range(12):
                length, count = rng.randint(1, 20), rng.randint(1, 18)
                bound += -(-(length + count) // 6) + count
                loop.add(make_request(f"r{i}", text(length, i), params=outputs(count), tenant=rng.choice("abc")))
            assert loop.drain(is_pipelined=is_pipelined) <= bound * (3 if is_pipelined else 1)
            num_preemptions += loop.scheduler.num_preemptions
            loop.check_ended()
        assert num_preemptions > 10

    def test_a_request_that_waits_for_budget_is_not_overtaken(self) -> None:
        """22 rows in one piece, a budget of 24, three outputs in each step: one of them must end first."""
        loop = make_loop(replace(LIMITS, max_num_seqs=5, max_num_batched_tokens=24))
        for name in "abc":
            loop.add(make_request(name, text(4, ord(name)), params=outputs(8 + ord(name) % 3)))
        loop.step()
        span = image(2, 22, is_whole=True)
        loop.add(make_request("image", with_images(26, span), spans=(span,), params=outputs(1)))
        assert rows(loop.step())[3:] == [("image", 0, 2)]
        loop.add(make_request("new", text(4), params=outputs(1)))
        while len(rows(plan := loop.step())) == 3 and sum(chunk.count for chunk in plan.chunks) == 3:
            assert [chunk.request_id for chunk in plan.chunks] == ["a", "b", "c"]
        assert rows(plan)[2:] == [("image", 2, 22)]
        loop.drain()
        loop.check_ended()

    def test_a_stream_of_new_requests_starves_nobody(self) -> None:
        """A large undivided image waits for budget and a long prompt for blocks, while short requests keep coming."""
        loop = make_loop(replace(LIMITS, max_num_seqs=4, max_num_batched_tokens=24), num_blocks=30)
        span = image(2, 22, is_whole=True)
        for step in range(200):
            loop.now = step
            for i in range(2):
                if loop.scheduler.stats().waiting < 6:
                    loop.add(make_request(f"s{step}.{i}", text(6, step), params=outputs(5 + i), arrival=loop.now))
            if step == 10:
                loop.add(make_request("image", with_images(24, span), spans=(span,), arrival=10, params=outputs(2)))
                loop.add(make_request("long", text(40), arrival=10, params=outputs(2)))
            loop.step()
            if step > 10 and loop.finish_reason("image") and loop.finish_reason("long"):
                break
        assert step < 60
        loop.drain()
        loop.check_ended()


class TestPipeline:
    def test_an_output_is_planned_before_its_input_is_known(self) -> None:
        loop = make_loop()
        loop.add(make_request("a", text(6), params=outputs(4)))
        loop.launch()
        plan = loop.launch()
        assert rows(plan) == [("a", 6, 1)]
        assert plan.chunks[0].is_pending_input
        loop.land()
        assert [chunk.is_pending_input for chunk in loop.launch().chunks] == [True]
        loop.land()
        loop.land()
        assert [chunk.is_pending_input for chunk in loop.launch().chunks] == [False]

    @pytest.mark.parametrize("count", [1, 2, 3])
    def test_no_row_is_planned_after_the_last_output(self, count: int) -> None:
        loop = make_loop()
        loop.add(make_request("a", text(6), params=outputs(count)))
        loop.drain()
        assert sum(chunk.count for plan in loop.plans for chunk in plan.chunks) == 6 + count - 1
        loop.check_ended()

    def test_rows_in_flight_of_an_ended_request_are_ignored_and_freed_later(self) -> None:
        scheduler = make_scheduler(LIMITS)
        scheduler.add(make_request("a", text(8), params=SamplingParams(max_tokens=9)))
        first, second = scheduler.plan(0), scheduler.plan(0)
        (event,) = scheduler.commit(first, {"a": [EOS]})
        assert event.finish == Finish(FinishReason.STOP)
        assert scheduler.resources.pool.num_used == 3
        scheduler.check()
        assert scheduler.commit(second, {"a": [12]}) == ()
        assert scheduler.is_idle
        assert scheduler.resources.pool.num_used == 0

    def test_an_id_can_be_used_again_while_the_old_rows_are_in_flight(self) -> None:
        scheduler = make_scheduler(LIMITS)
        scheduler.add(make_request("a", text(8), params=outputs(9)))
        plan = scheduler.plan(0)
        scheduler.abort("a")
        again = make_request("a", text(5), params=outputs(9))
        scheduler.add(again)
        second = scheduler.plan(0)
        assert scheduler.commit(plan, {"a": [12]}) == ()
        scheduler.check()
        assert scheduler.commit(second, {"a": [13]}) == (Update("a", (13,)),)
        assert again.output_ids == [13]

    def test_commits_come_in_order_and_at_most_two_plans_are_in_flight(self) -> None:
        scheduler = make_scheduler(LIMITS)
        scheduler.add(make_request("a", text(8), params=outputs(9)))
        scheduler.plan(0)
        second = scheduler.plan(0)
        with pytest.raises(AssertionError, match="two plans are in flight"):
            scheduler.plan(0)
        with pytest.raises(AssertionError, match="plan 1 is committed, plan 0 is due"):
            scheduler.commit(second, {"a": [1]})

    def test_a_missing_token_fails_an_assertion(self) -> None:
        scheduler = make_scheduler(LIMITS)
        scheduler.add(make_request("a", text(8), params=outputs(9)))
        with pytest.raises(AssertionError, match="a wants a token"):
            scheduler.commit(scheduler.plan(0), {})

    def test_an_empty_plan_needs_no_commit(self) -> None:
        scheduler = make_scheduler(LIMITS)
        plan = scheduler.plan(0)
        assert not plan.chunks
        assert scheduler.commit(plan, {}) == ()
        assert scheduler.is_idle


class TestForks:
    @pytest.mark.parametrize("has_prefix", [True, False])
    @pytest.mark.parametrize(("length", "shared"), [(10, 2), (12, 2), (13, 3), (3, 0)])
    def test_forks_share_full_prompt_blocks_and_recompute_the_rest(
        self, length: int, shared: int, has_prefix: bool
    ) -> None:
        loop = make_loop(has_prefix=has_prefix)
        loop.add(make_request("a", text(length), params=outputs(5, n=3)))
        assert rows(loop.step()) == [("a", 0, length)]
        plan = loop.step()
        left = length - 4 * shared
        assert rows(plan) == [("a", length, 1), ("a:1", 4 * shared, left), ("a:2", 4 * shared, left)]
        parent, *children = (chunk.blocks for chunk in plan.chunks)
        for blocks in children:
            assert blocks[:shared] == parent[:shared]
            assert not set(blocks[shared:]) & set(parent)
        loop.drain()
        loop.check_ended()
        assert len({tuple(loop.outputs(name)) for name in loop.requests}) == 3

    def test_a_fork_has_its_own_seed_and_no_prompt_scores(self) -> None:
        request = make_request("a", text(4), params=SamplingParams(n=3, seed=2**63 - 1, prompt_logprobs=2))
        forks = [request.fork(i).params for i in (1, 2)]
        assert [params.seed for params in forks] == [-(2**63), -(2**63) + 1]
        assert [(params.n, params.prompt_logprobs) for params in forks] == [(1, None)] * 2
        assert make_request("b", text(4), params=SamplingParams(n=2)).fork(1).params.seed is None

    def test_aborting_a_request_ends_its_forks_too_and_a_fork_only_itself(self) -> None:
        loop = make_loop()
        loop.add(make_request("a", text(10), params=outputs(5, n=3)))
        loop.step()
        loop.step()
        loop.abort("a:1")
        assert loop.finish_reason("a:1") == "abort"
        loop.abort("a")
        assert [loop.finish_reason(name) for name in ("a", "a:2")] == ["abort", "abort"]
        loop.drain()
        loop.check_ended()

    def test_forks_continue_when_the_parent_has_ended(self) -> None:
        loop = make_loop(replace(LIMITS, max_num_seqs=1))
        loop.add(make_request("a", text(10), params=outputs(2, n=3)))
        loop.drain()
        loop.check_ended()
        assert [loop.finish_reason(name) for name in loop.requests] == ["length"] * 3

    def test_forks_survive_a_parent_that_fails(self) -> None:
        loop = make_loop()
        loop.add(make_request("a", text(10), params=outputs(2, n=2)))
        loop.step(failing=[0])
        loop.drain()
        loop.check_ended()
        assert [loop.finish_reason(name) for name in loop.requests] == ["error", "length"]


def test_a_storm_of_aborts_leaves_nothing_in_use() -> None:
    """1,000 requests are aborted while they wait, run or are preempted, with rows in no, one or two plans."""
    rng = random.Random(11)
    limits = replace(LIMITS, max_num_seqs=16, max_num_batched_tokens=48, prefill_chunk_tokens=9)
    loop = make_loop(limits, num_blocks=60, encoder_rows=64)
    phases: Counter[tuple[str, int]] = Counter()
    live: list[Request] = []
    while phases.total() < 1000:
        while len(live) < 20:
            live.append(storm_request(f"r{len(loop.requests)}", rng))
            loop.add(live[-1])
        for _ in range(rng.choice([0, 0, 0, 1, 4])):
            preempted = [request for request in live if request.status is Status.PREEMPTED]
            request = rng.choice(preempted if preempted and rng.random() < 0.3 else live)
            live.remove(request)
            if request.finish is None:
                phases[request.status.value, in_flight(loop, request)] += 1
                loop.abort(request.id)
        if len(loop.flights) == 2 or (loop.flights and rng.random() < 0.4):
            loop.land()
        else:
            loop.launch()
    for phase in [("waiting", 0), ("running", 0), ("running", 1), ("running", 2), ("preempted", 0), ("preempted", 1)]:
        assert phases[phase] > 0, f"nobody was aborted {phase}: {phases}"
    for request in live:
        loop.abort(request.id)
    while loop.flights:
        loop.land()
    assert loop.scheduler.is_idle
    assert loop.scheduler.resources.pool.num_used == 0
    assert loop.scheduler.resources.encoder.num_held_rows == 0
    loop.check_ended()


def in_flight(loop: Loop, request: Request) -> int:
    return sum(chunk.request_id == request.id for plan, _ in loop.flights for chunk in plan.chunks)


def storm_request(name: str, rng: random.Random) -> Request:
    span = image(rng.randint(0, 5), rng.randint(1, 12), bytes([rng.randint(65, 70)]))
    span = replace(span, length=1 + span.digest[0] % 8)
    spans = (span,) if rng.random() < 0.5 else ()
    return make_request(name, with_images(rng.randint(14, 20), *spans), spans=spans, params=ENDLESS)


def test_a_reader_of_failed_rows_that_was_preempted_meanwhile_starts_again() -> None:
    """Preempted between launch and commit, it no longer holds the rows. The token sampled from them is dropped."""
    num_cases = 0
    for num_blocks in range(9, 14):
        for num_steps in range(6):
            loop = make_loop(LIMITS, num_blocks=num_blocks, has_prefix=False)
            loop.add(make_request("zero", [5] * 8, params=outputs(12)))
            for _ in range(num_steps):
                loop.step()
            span = image(2, 6)
            for name in "ab":
                loop.add(make_request(name, with_images(12, span), spans=(span,), params=outputs(12)))
            plan = loop.launch()
            if not {"a", "b"} <= {chunk.request_id for chunk in plan.chunks}:
                continue
            loop.flights.clear()
            loop.device.poisoned.clear()
            loop.flights.append((plan, loop.device.run(plan, loop.requests, ["a"])))
            if "b" not in loop.launch().preempted:
                continue
            num_cases += 1
            loop.land()
            assert loop.requests["b"].output_ids == []
    assert num_cases, "no case was found; choose other sizes"


def test_statistics() -> None:
    loop = make_loop(replace(LIMITS, max_num_seqs=1))
    for name in "ab":
        loop.add(make_request(name, text(12, ord(name)), params=outputs(5)))
    loop.launch()
    stats = loop.scheduler.stats()
    assert (stats.waiting, stats.waiting_tokens, stats.running) == (1, 12, 1)
    assert stats.kv_usage == pytest.approx(3 / 63)


def test_the_work_for_an_image_does_not_grow_with_the_number_of_images() -> None:
    def add(num_images: int) -> None:
        limits = replace(LIMITS, max_model_len=10_000, max_queued_tokens=10_000)
        spans = tuple(Span(4 * i, 4, bytes([i // 256, i % 256]) * 16, media_idx=i) for i in range(num_images))
        request = Request(id="a", prompt_ids=(7,) * 4 * num_images, params=outputs(1), spans=spans)
        make_scheduler(limits, num_blocks=2000).add(request)

    few, many = (num_opcodes(lambda n=n: add(n), request_module, request_checks) for n in (50, 200))  # type: ignore[misc]
    assert few > 50 * 10 and many < 1.3 * 4 * few


def test_spans_out_of_order_fail_an_assertion() -> None:
    scheduler: Scheduler = make_scheduler(LIMITS)
    bad: list[tuple[Span, ...]] = [
        (image(4, 3), image(2, 1, media_idx=1)),
        (image(0, 3), image(2, 3, media_idx=1)),
        (image(8, 5),),
        (Span(0, 3, b"short"),),
        (replace(image(0, 3), first_row=2),),
        (image(0, 2, media_idx=1), image(3, 2, b"j", media_idx=0)),
    ]
    for spans in bad:
        with pytest.raises(AssertionError):
            scheduler.add(make_request("a", text(10), spans=spans))
    assert scheduler.is_idle
    assert RowError("x") == RowError("x")


def test_a_request_for_no_outputs_ends_when_its_prompt_is_computed() -> None:
    loop = make_loop(replace(LIMITS, prefill_chunk_tokens=8))
    loop.add(make_request("scored", text(20), params=outputs(0, prompt_logprobs=0, n=2)))
    loop.add(make_request("longest", text(64, 12), params=outputs(0)))
    loop.drain()
    loop.check_ended()
    assert not any(chunk.wants_logits for plan in loop.plans for chunk in plan.chunks)
    assert loop.device.scored["scored"] == set(range(20))
    assert {name: events[-1].finish for name, events in loop.events.items()} == dict.fromkeys(
        ("scored", "scored:1", "longest"), Finish(FinishReason.LENGTH)
    )


def test_caches_are_emptied_only_when_nothing_runs() -> None:
    loop = make_loop()
    span = image(2, 5)
    for name in "ab":
        loop.add(make_request(name, with_images(12, span), spans=(span,), params=outputs(2)))
        assert not loop.scheduler.forget_cached()
        loop.drain()
    stats = loop.scheduler.stats()
    assert (stats.prefix_hit_tokens, stats.encoder_queries, stats.encoder_hits) == (8, 1, 0)
    assert loop.scheduler.forget_cached()
    loop.add(make_request("c", with_images(12, span), spans=(span,), params=outputs(2)))
    loop.drain()
    loop.check_ended()
    stats = loop.scheduler.stats()
    assert (stats.prefix_hit_tokens, stats.encoder_queries, stats.encoder_hits) == (8, 2, 0)


def test_without_a_cache_an_image_is_shared_only_by_concurrent_requests() -> None:
    loop = make_loop(has_prefix=False, keeps_images=False)
    span = image(2, 5)
    for names in ("a", "b", "cd"):
        for name in names:
            loop.add(make_request(name, with_images(12, span), spans=(span,), params=outputs(2)))
        loop.drain()
    loop.check_ended()
    assert [len(plan.encode) for plan in loop.plans if plan.encode] == [1, 1, 1]

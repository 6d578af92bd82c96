"""The parts of a deployment that need no cluster: settings, messages, loads, scaling."""

from random import randbytes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from saccade import bundled
from saccade.client.output import Logprob
from saccade.client.stream import Delta
from saccade.errors import CapacityError, ConfigError, EngineDeadError, RequestError, SaccadeError
from saccade.inputs.placeholders import Media, Prompt, text_prompt
from saccade.inputs.plans import MediaPlan
from saccade.ray.autoscaling import TokenScaling
from saccade.ray.deploy_plan import decode_plan, encode_plan, read_plan
from saccade.ray.loads import Loads
from saccade.ray.ray_messages import (
    Question,
    ReplicaReply,
    Route,
    decode_question,
    decode_reply,
    encode,
    ended,
    error_of,
    flat,
    prompt_of,
)
from saccade.wire.messages import pack_prompt
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.turn import Terms, Turn


def test_without_settings_the_bundled_model_is_served_on_a_cpu() -> None:
    plan = read_plan({})
    assert plan.launch().model == str(bundled.path()) and plan.num_gpus == 0
    assert plan.limits.max_num_seqs == 4 and plan.server.served_model_name == ("saccade",)
    assert plan.most_inside == 4 + 4096 and plan.room_tokens == 512


def test_settings_have_the_names_of_flags_and_text_is_converted_to_their_types() -> None:
    plan = read_plan(
        {"model": "org/name", "tensor-parallel-size": "4", "replicas": "2", "max_replicas": 8, "api_key": ["a"]}
        | {"enable_prefix_caching": "false", "gpu-memory-utilization": "0.5"}
    )
    assert (plan.model, plan.num_gpus, plan.deploy.replicas, plan.deploy.most_replicas) == ("org/name", 4, 2, 8)
    assert plan.server.api_key == ("a",) and not plan.engine.enable_prefix_caching
    assert plan.engine.gpu_memory_utilization == 0.5 and plan.room_tokens == 2 * 8192
    assert decode_plan(encode_plan(plan)) == plan
    assert read_plan({"model": "org/name", "device": "cpu"}).num_gpus == 0
    assert read_plan({"model": "org/name", "replica_gpus": 0.5}).num_gpus == 0.5


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"replica": 2}, "unknown setting replica; did you mean replicas?"),
        ({"data_parallel_size": 2}, "not a setting on a Ray cluster: use --replicas for the number of engines"),
        ({"ssl_certfile": "a"}, "end TLS in front of them"),
        ({"port": 80}, "--host and --port of `saccade deploy`"),
        ({"replicas": "many"}, "a setting of the application is wrong: .*replicas"),
        ({"replicas": 0}, "replicas is 0; it must be at least 1"),
        ({"replicas": 3, "max_replicas": 2}, "max_replicas is 2; it must be at least replicas, which is 3"),
        ({"route_prefix": "v1"}, "it must begin with /"),
        ({"stats_period_s": 0}, "stats_period_s is 0"),
        ({"max_num_seqs": -1}, "max_num_seqs is -1"),
    ],
)
def test_wrong_settings_are_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_plan(given)


def test_a_request_crosses_machines_with_its_pixels() -> None:
    pixels = np.random.default_rng().integers(0, 256, (6, 4, 3), dtype=np.uint8)
    plan = MediaPlan(size_hw=(28, 28), grid_thw=(1, 2, 2), num_patches=4, num_tokens=1)
    plain = text_prompt([3, 1, 2])
    prompt = Prompt(
        plain.token_ids, plain.positions_3T, 7, media=(Media("image", pixels, plan, b"d" * 32),), is_continued=True
    )
    head, arrays = pack_prompt(prompt)
    asked = Question(
        "r", head, SamplingParams(max_tokens=3, stop=("x",)), Terms(Turn(1, "t", 2.0), cache_salt="salt"), 2.5, True
    )
    again = decode_question(encode(asked))
    assert again == asked
    found = prompt_of(again, flat(arrays))
    assert found.token_ids.tolist() == [3, 1, 2] and found.rope_delta == 7 and found.is_continued
    assert np.array_equal(found.media[0].pixels, pixels) and found.media[0].plan == plan


def test_answers_and_errors_cross_machines() -> None:
    delta = Delta(
        request_id="r",
        index=1,
        token_ids=(5, 6),
        text="ab",
        logprobs=({5: Logprob(-0.5, 1)}, {6: Logprob(-1.5, 2)}),
        num_prompt_tokens=3,
        num_cached_tokens=2,
        num_output_tokens=2,
        finish_reason="stop",
        stop_reason=7,
        prompt_logprobs=(None, {1: Logprob(-2.0, 3)}),
        timings={"queue": 0.25},
    )
    assert decode_reply(encode(ReplicaReply(delta=delta))) == ReplicaReply(delta=delta)
    vector = np.arange(5, dtype=np.float32) / 3
    crossed = decode_reply(encode(ReplicaReply(delta=replace(delta, pooled=vector)))).delta
    assert crossed is not None and crossed.pooled is not None and np.array_equal(crossed.pooled, vector)
    request = RequestError("wrong", param="p", code="c", status=413)
    found = error_of(decode_reply(encode(ReplicaReply(ended=ended(request, "r1")))).ended)  # type: ignore[arg-type]
    assert isinstance(found, RequestError)
    assert (str(found), found.param, found.code, found.status) == ("wrong", "p", "c", 413)
    full = error_of(ended(CapacityError("full", retry_after_s=7), "r1"))
    assert isinstance(full, CapacityError) and full.retry_after_s == 7
    assert isinstance(error_of(ended(EngineDeadError("gone"), "r1")), EngineDeadError)
    inner = error_of(ended(ValueError("secret"), "r1"))
    assert type(inner) is SaccadeError and "secret" not in str(inner)


class Pending:
    def __init__(self) -> None:
        self.is_cancelled = False
        self.future = SimpleNamespace(cancelled=lambda: self.is_cancelled)


def test_a_request_counts_as_load_from_its_assignment_to_its_end() -> None:
    loads, names = Loads("affinity", 0), dict.fromkeys("abc", 0)
    route = Route(randbytes(16), 100)
    first, second, _ = loads.order(route, names)
    loads.take("1", first, 100, Pending())
    assert loads.tokens[first] == 100 and loads.order(route, names)[0] == second
    loads.take("1", second, 100)  # the first one was full
    assert (loads.tokens[first], loads.tokens[second]) == (0, 100)
    loads.drop("1")
    loads.drop("1")
    assert set(loads.tokens.values()) == {0}


def test_requests_cancelled_before_a_replica_accepts_them_do_not_count() -> None:
    loads, pending = Loads("affinity", 0), Pending()
    loads.order(Route(b"k", 10), {"a": 0})
    loads.take("1", "a", 10, pending)
    pending.is_cancelled = True
    loads.order(Route(b"k", 10), {"a": 0})
    assert loads.tokens == {"a": 0}


def test_requests_of_other_front_ends_count_and_some_replicas_are_avoided() -> None:
    loads, route = Loads("affinity", 0), Route(b"key", 10)
    home = loads.order(route, dict.fromkeys("abc", 0))[0]
    others = loads.order(route, {name: 1000 if name == home else 0 for name in "abc"})
    assert others[0] != home
    assert loads.order(route._replace(avoid=(home,)), dict.fromkeys("abc", 0))[-1] == home
    assert loads.order(Route(b"", 0), {"a": 5, "b": 1})[0] == "b", "calls that are no requests go to the least loaded"
    assert set(loads.order(route, {"x": 0})) == {"x"} and set(loads.tokens) == {"x"}


@given(st.floats(0, 1e6), st.floats(0, 1e4))
def test_tokens_and_requests_both_call_for_replicas(tokens: float, requests: float) -> None:
    wanted = TokenScaling(target_tokens=1000, target_requests=10).wanted({"tokens": tokens, "requests": requests})
    assert wanted >= 1 and wanted * 1000 >= tokens and wanted * 10 >= requests
    assert wanted == 1 or (wanted - 1) * 1000 < tokens or (wanted - 1) * 10 < requests


def test_scaling_reads_the_stats_of_replicas() -> None:
    policy = TokenScaling(target_tokens=100, target_requests=10)
    told = {"tokens": {"a": 150.0, "b": 120.0}, "requests": {"a": 3.0, "b": 2.0}}
    assert policy(SimpleNamespace(aggregated_metrics=told)) == (3, {})
    assert policy(SimpleNamespace(aggregated_metrics=None)) == (1, {})

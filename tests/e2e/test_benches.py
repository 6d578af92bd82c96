"""The request bodies of the benchmarks that people compare servers with."""

import json
from itertools import pairwise
from typing import Any

import httpx2
import pytest

from saccade.cli import main
from tests.e2e.metrics import gauges
from tests.e2e.pictures import encoded, image_part, picture
from tests.e2e.process import ServerProcess

LINES = list[dict[str, Any]]


def stream(http: httpx2.Client, path: str, body: dict[str, Any], **headers: str) -> LINES:
    """The chunks of a stream, read as the benchmarks read them: line by line, `data: ` cut off."""
    found = []
    with http.stream("POST", path, json=body, headers={"authorization": "Bearer none", **headers}) as reply:
        assert reply.status_code == 200, reply.read()
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in reply.iter_lines() if line and not line.startswith(":")]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        assert line.startswith("data: ")
        found.append(json.loads(line.removeprefix("data: ")))
    return found


def jpeg_part(seed: int) -> dict[str, Any]:
    return image_part(encoded(picture(seed, (56, 56)), "JPEG"), "image/jpeg")


@pytest.mark.parametrize("output_len", [1, 5])
def test_sglang_bench_serving_with_images(http: httpx2.Client, output_len: int) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": [jpeg_part(1), {"type": "text", "text": "random words " * 5}]}],
        "temperature": 0.0,
        "max_completion_tokens": output_len,
        "stream": True,
        "ignore_eos": True,
    }
    chunks = stream(http, "/v1/chat/completions", body)
    assert all("content" in chunk["choices"][0]["delta"] for chunk in chunks[:-1])
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_sglang_bench_serving_native(http: httpx2.Client) -> None:
    body = {
        "text": "random words",
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True},
        "stream": True,
        "lora_path": None,
        "return_logprob": False,
        "return_routed_experts": False,
        "logprob_start_len": -1,
    }
    chunks = stream(http, "/generate", body)
    texts = [chunk["text"] for chunk in chunks]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts)), "cumulative"
    counts = [chunk["meta_info"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 6
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 6}
    plain = http.post("/generate", json=body | {"stream": False}).json()
    assert plain["text"] == texts[-1] and len(plain["output_ids"]) == 6


def test_vllm_bench_serve_chat_with_images(http: httpx2.Client) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "random"}, jpeg_part(1), jpeg_part(2)]}],
        "max_completion_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "ignore_eos": True,
    }
    chunks = stream(http, "/v1/chat/completions", body, **{"x-request-id": "bench-0001"})
    assert chunks[0]["id"] == "chatcmpl-bench-0001"
    assert chunks[-1]["usage"]["completion_tokens"] == 4 and not chunks[-1]["choices"]


def test_vllm_bench_serve_completions(http: httpx2.Client) -> None:
    body = {
        "model": "tiny",
        "prompt": "random words",
        "repetition_penalty": 1.0,
        "max_tokens": 4,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "ignore_eos": True,
    }
    chunks = stream(http, "/v1/completions", body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])
    assert chunks[-1]["usage"]["completion_tokens"] == 4


def test_lm_eval_scores_token_ids(http: httpx2.Client) -> None:
    body = {"model": "tiny", "prompt": [[5, 6, 7, 8]], "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    [choice] = http.post("/v1/completions", json=body | {"seed": 1234}).json()["choices"]
    assert len(choice["logprobs"]["token_logprobs"]) == 5 and choice["logprobs"]["token_logprobs"][0] is None


def test_timings_and_metrics_know_the_engines_stages(http: httpx2.Client) -> None:
    body = {"messages": [{"role": "user", "content": [jpeg_part(9)]}], "max_tokens": 3, "ignore_eos": True}
    found = http.post("/v1/chat/completions", json=body | {"timings": True}).json()["timings"]
    stages = ("receive_ms", "parse_ms", "preprocess_ms", "queue_ms", "prefill_ms", "decode_ms")
    assert all(found[name] >= 0 for name in stages)
    assert found["queue_ms"] + found["prefill_ms"] + found["decode_ms"] <= found["total_ms"]
    numbers = gauges(http.get("/metrics").text)
    for stage in ("queue", "prefill", "decode", "inference"):
        assert numbers[f"vllm:request_{stage}_time_seconds_count"] > 0
    phases = {phase["phase"] for phase in http.get("/graphs").json()["phases"]}
    assert {"vision", "prefill", "decode"} <= phases


def test_saccade_bench_serve_says_that_a_server_is_warm(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"bench serve --base-url {server.url} --num-prompts 4 --max-concurrency 2 --warmup-requests 1 --seed 4711"
    command = [*line.split(), "--image-resolution", "56x84", "--random-input-len", "60", "--random-range-ratio", "1"]
    shown = []
    for more in ([], [], ["--seed", "4712"]):
        assert main([*command, *more]) == 0
        shown.append(capsys.readouterr().out)
    assert ["WARM CACHE" in text for text in shown] == [False, True, False], shown[1]
    assert "of the prompt tokens" in shown[1]

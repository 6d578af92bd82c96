"""Scrapes: vLLM's names for its dashboards, ours for graphs."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from msgspec import structs
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from saccade.errors import CapacityError, RequestError
from saccade.inputs.media.media_pool import MediaPool
from saccade.server.figures.metrics import prefers_openmetrics
from saccade.server.service import Service
from saccade.wire.engine_metrics import JobStats, Metric, counter, new_step_tokens
from tests.server.fake import HANG_S, Caller, FakeEngine, service_for

HELLO: list[Any] = [{"role": "user", "content": "hi"}]
Scripted = Callable[..., tuple[Caller, FakeEngine, Service]]
# The metrics that vLLM's Grafana dashboard queries.
DASHBOARD = [
    "vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_sum",
    "vllm:request_queue_time_seconds_sum", "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum", "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket", "vllm:request_max_num_generation_tokens_sum", "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total", "vllm:request_success_total", "vllm:num_requests_running",
    "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:mm_cache_queries_total",
    "vllm:mm_cache_hits_total", "vllm:cache_config_info",
]  # fmt: skip
VLLM_TTFT = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
]  # fmt: skip


def samples(text: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def test_vllm_dashboards_find_every_name(scripted: Scripted) -> None:
    caller, _, _ = scripted()

    async def run() -> dict[str, list[Any]]:
        for _ in range(3):
            assert (await caller.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 9})).status == 200
        return samples((await caller.get("/metrics")).body.decode())

    found = asyncio.run(run())
    assert set(DASHBOARD) <= found.keys()
    for name in DASHBOARD:
        assert {"model_name", "engine"} <= found[name][0].labels.keys()
    assert found["vllm:time_to_first_token_seconds_count"][0].value == 3
    assert found["vllm:generation_tokens_total"][0].value == 6
    stops = {sample.labels["finished_reason"]: sample.value for sample in found["vllm:request_success_total"]}
    assert stops["stop"] == 3
    edges = {float(sample.labels["le"]) for sample in found["vllm:time_to_first_token_seconds_bucket"]}
    assert set(VLLM_TTFT) <= edges


def test_graphs_have_their_own_metrics(scripted: Scripted) -> None:
    caller, _, _ = scripted()
    found = samples(asyncio.run(caller.get("/metrics")).body.decode())
    [replays] = found["saccade:graph_replays_total"]
    assert replays.labels == {"phase": "decode", "budget": "decode full rows=8"} and replays.value == 3
    assert found["saccade:graph_fallback_total"][0].labels["reason"] == "too_large"
    assert found["saccade:graph_padding_tokens_total"][0].value == 1
    assert found["saccade:graph_memory_bytes"][0].value == 10
    assert found["saccade:graph_selfcheck_max_abs_diff"][0].value == 0.25
    checks = {sample.labels["result"]: sample.value for sample in found["saccade:shadow_checks_total"]}
    assert checks == {"equal": 7, "different": 1}
    assert found["saccade:graphs_out_of_service"][0].value == 1
    phases = asyncio.run(caller.get("/graphs")).json["phases"]
    assert phases[0]["phase"] == "decode" and phases[0]["graphs"][0]["replays"] == 3


@pytest.mark.parametrize(
    ("style", "there", "not_there"),
    [
        ("own", ["saccade:num_requests_running", "vllm:num_requests_running"], ["sglang:num_running_reqs"]),
        ("vllm", ["vllm:num_requests_running", "saccade:graph_replays_total"], ["saccade:num_requests_running"]),
        ("sglang", ["sglang:num_running_reqs", "sglang:token_usage"], ["vllm:num_requests_running"]),
    ],
)
def test_the_style_chooses_the_prefix(engine: FakeEngine, style: str, there: list[str], not_there: list[str]) -> None:
    found = samples(asyncio.run(Caller(service_for(engine, metrics_style=style)).get("/metrics")).body.decode())
    assert set(there) <= found.keys() and not set(not_there) & found.keys()


OPENMETRICS = "application/openmetrics-text"
PROMETHEUS = (
    f"{OPENMETRICS};version=1.0.0;q=0.5,{OPENMETRICS};version=0.0.1;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@pytest.mark.parametrize("style", ["own", "vllm", "sglang"])
def test_both_formats_have_the_same_samples(engine: FakeEngine, style: str) -> None:
    engine.gpu_bytes = 2**36
    caller = Caller(service_for(engine, metrics_style=style))

    async def run() -> tuple[Any, Any]:
        await caller.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 9})
        return await caller.get("/metrics"), await caller.get("/metrics", accept=PROMETHEUS)

    plain, found = asyncio.run(run())
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert found.headers["content-type"] == f"{OPENMETRICS}; version=1.0.0; charset=utf-8"
    families = list(openmetrics_families(found.body.decode()))  # raises if names clash
    assert {sample.name for family in families for sample in family.samples} == samples(plain.body.decode()).keys()
    with pytest.raises(ValueError, match="Clashing name"):
        list(openmetrics_families(plain.body.decode() + "# EOF\n"))


@pytest.mark.parametrize(
    ("accept", "is_wanted"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        (OPENMETRICS, True),
        (f"{OPENMETRICS.upper()} ; version=1.0.0", True),
        (PROMETHEUS, True),
        (f"text/plain, {OPENMETRICS};q=0.5", False),
        (f"{OPENMETRICS};q=0", False),
        (f"{OPENMETRICS};q=much", False),
    ],
)
def test_clients_choose_the_format(accept: str, is_wanted: bool) -> None:
    assert prefers_openmetrics(accept) == is_wanted


def test_steps_are_counted_by_their_tokens() -> None:
    steps = new_step_tokens()
    for num_tokens in (1, 2, 8, 9, 16384, 16385):
        steps.note(num_tokens)
    buckets = dict(steps.buckets)
    assert (buckets["1.0"], buckets["8.0"], buckets["16.0"], buckets["16384.0"], buckets["+Inf"]) == (1, 3, 4, 5, 6)
    assert steps.total == 1 + 2 + 8 + 9 + 16384 + 16385


def test_unknown_paths_do_not_become_labels(scripted: Scripted) -> None:
    caller, _, _ = scripted()

    async def run() -> dict[str, list[Any]]:
        for path in ("/a", "/b", '/"\n'):
            await caller.get(path)
        return samples((await caller.get("/metrics")).body.decode())

    paths = [sample.labels["path"] for sample in asyncio.run(run())["saccade:http_requests_total"]]
    assert paths == ["other"]


def test_a_root_path_does_not_change_labels(engine: FakeEngine) -> None:
    caller = Caller(service_for(engine, root_path="/vlm"))

    async def run() -> dict[str, list[Any]]:
        await caller.get("/vlm/version")
        return samples((await caller.get("/metrics")).body.decode())

    assert [sample.labels["path"] for sample in asyncio.run(run())["saccade:http_requests_total"]] == ["/version"]


def test_gpu_memory_is_reported_if_there_is_a_gpu(engine: FakeEngine) -> None:
    caller = Caller(service_for(engine))
    names = [f"saccade:gpu_memory_{word}_bytes" for word in ("used", "ready", "reserved")]
    assert not set(names) & samples(asyncio.run(caller.get("/metrics")).body.decode()).keys()
    engine.gpu_bytes, engine.ready = 2**36 + 1, structs.replace(engine.ready, gpu_bytes=2**36)
    engine.gpu_reserved_bytes = 2**35 + 3
    found = samples(asyncio.run(caller.get("/metrics")).body.decode())
    assert [found[name][0].value for name in names] == [2**36 + 1, 2**36, 2**35 + 3]


def test_processes_for_untrusted_data_are_counted(engine: FakeEngine) -> None:
    service = service_for(engine)
    engine.grammar_jobs = JobStats(waiting=3, killed=4)
    caller = Caller(service)
    found = samples(asyncio.run(caller.get("/metrics")).body.decode())
    assert found["saccade:grammar_jobs_waiting"][0].value == 3
    assert found["saccade:grammar_processes_killed_total"][0].value == 4
    assert "saccade:media_jobs_waiting" not in found, "no media are decoded"
    service.media_pool = media = MediaPool(2)
    try:
        media.pool.num_killed = 5
        found = samples(asyncio.run(caller.get("/metrics")).body.decode())
    finally:
        media.close()
    assert found["saccade:media_jobs_waiting"][0].value == 0
    assert found["saccade:media_processes_killed_total"][0].value == 5


def test_tokens_are_counted_as_they_arrive(scripted: Scripted) -> None:
    counted = asyncio.Event()

    async def slow(prompt: Any, params: Any) -> AsyncGenerator[dict[str, Any], None]:
        yield {"text": "a", "token_ids": (5, 6, 7)}
        await counted.wait()
        yield {"text": "b", "token_ids": (8,), "finish_reason": "stop"}

    caller, _, _ = scripted(slow)

    async def scraped() -> tuple[float, float, float]:
        found = samples((await caller.get("/metrics")).body.decode())
        ended = sum(sample.value for sample in found["vllm:request_success_total"])
        return found["vllm:prompt_tokens_total"][0].value, found["vllm:generation_tokens_total"][0].value, ended

    async def run() -> tuple[Any, Any, int]:
        call = asyncio.create_task(caller.post("/v1/chat/completions", {"messages": HELLO}))
        async with asyncio.timeout(HANG_S):
            while (
                0 in (early := await scraped())[:2]
            ):  # a scrape reads one counter after the other while the server runs
                await asyncio.sleep(0.01)
        counted.set()
        return (
            early,
            await scraped() if (await call).status == 200 else None,
            call.result().json["usage"]["prompt_tokens"],
        )

    early, late, num_prompt = asyncio.run(run())
    assert early == (num_prompt, 3, 0) and late == (num_prompt, 4, 1)


@pytest.mark.parametrize("error", [RequestError("no"), CapacityError("full", retry_after_s=1)])
def test_requests_that_the_engine_refuses_do_not_count_as_ended(scripted: Scripted, error: Exception) -> None:
    async def refuses(prompt: Any, params: Any) -> AsyncGenerator[dict[str, Any], None]:
        if prompt is not None:
            raise error
        yield {}

    caller, _, _ = scripted(refuses)

    async def run() -> dict[str, list[Any]]:
        assert (await caller.post("/v1/chat/completions", {"messages": HELLO})).status in (400, 503)
        return samples((await caller.get("/metrics")).body.decode())

    found = asyncio.run(run())
    refused = found["saccade:requests_refused_total"][0].value
    assert refused == isinstance(error, CapacityError), "the server was full"
    assert not sum(sample.value for sample in found["vllm:request_success_total"])
    assert found["vllm:e2e_request_latency_seconds_count"][0].value == 0


def test_a_scrape_needs_no_engine() -> None:
    found = samples(asyncio.run(Caller(service_for(None)).get("/metrics")).body.decode())
    assert found["saccade:ready"][0].value == 0 and "vllm:num_requests_running" not in found


def test_replies_of_a_new_kind_may_be_counted_during_a_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scrape is written in a thread."""
    made = service_for(None)
    caller = Caller(made)

    def counted(plain: str, text: str, value: float, **labels: str) -> Metric:
        made.metrics.note_http("/new", len(made.metrics._replies))
        return counter(plain, text, value, **labels)

    async def run() -> str:
        await caller.get("/version")
        monkeypatch.setattr("saccade.server.figures.metrics.counter", counted)
        found = await caller.get("/metrics")
        assert found.status == 200
        return found.body.decode()

    assert "saccade:http_requests_total" in samples(asyncio.run(run()))

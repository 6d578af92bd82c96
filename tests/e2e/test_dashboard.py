"""vLLM's Grafana dashboard on a scrape of this server: every series that its panels query is there, and is right."""

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import wait_idle
from tests.e2e.pictures import asked, encoded, image_part, picture

# What the panels query, with the labels that they choose or group by. A histogram is queried by quantile and heat map
# (buckets, by `le`) and by mean (sum and count).
HISTOGRAMS = (
    "vllm:e2e_request_latency_seconds",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_max_num_generation_tokens",
)
COUNTERS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total")
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
TEXT: list[Any] = [{"role": "user", "content": "a text"}]
NUM_TOKENS = {"text": 5, "image": 3}


class Scrape:
    def __init__(self, http: httpx2.Client) -> None:
        families = text_string_to_metric_families(http.get("/metrics").text)
        self.samples = [sample for family in families for sample in family.samples]

    def find(self, name: str, **labels: str) -> list[Any]:
        return [s for s in self.samples if s.name == name and labels.items() <= s.labels.items()]

    def value(self, name: str, **labels: str) -> float:
        [found] = self.find(name, model_name="tiny", **labels)
        return float(found.value)


class Seen(NamedTuple):
    before: Scrape
    after: Scrape
    usages: list[dict[str, Any]]
    elapsed_s: float

    def grown(self, name: str, **labels: str) -> float:
        return self.after.value(name, **labels) - self.before.value(name, **labels)


@pytest.fixture(scope="module")
def seen(shared: Any) -> Iterator[Seen]:
    """One text and one image request between two scrapes."""
    with shared.client() as http:
        wait_idle(http)
        before, begun = Scrape(http), time.monotonic()
        usages = []
        for kind, messages in (("text", TEXT), ("image", asked(image_part(encoded(picture(77)))))):
            fields = {"messages": messages, "max_tokens": NUM_TOKENS[kind], "ignore_eos": True}
            usages.append(http.post("/v1/chat/completions", json=fields).json()["usage"])
        wait_idle(http)
        yield Seen(before, Scrape(http), usages, time.monotonic() - begun)


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_histograms_have_a_panel_each(seen: Seen, name: str) -> None:
    buckets = seen.after.find(f"{name}_bucket", model_name="tiny")
    edges = [float(sample.labels["le"]) for sample in buckets]
    counts = [sample.value for sample in buckets]
    assert len(edges) > 5 and edges == sorted(set(edges)) and edges[-1] == float("inf")
    assert counts == sorted(counts) and counts[-1] == seen.after.value(f"{name}_count")
    assert seen.after.value(f"{name}_sum") >= 0


@pytest.mark.parametrize("name", [name for name in HISTOGRAMS if "inter_token" not in name])
def test_a_request_counts_once(seen: Seen, name: str) -> None:
    assert seen.grown(f"{name}_count") == 2
    assert seen.grown(f"{name}_bucket", le="+Inf") == 2


def test_numbers_of_tokens_are_those_of_the_replies(seen: Seen) -> None:
    num_prompt = sum(usage["prompt_tokens"] for usage in seen.usages)
    num_output = sum(NUM_TOKENS.values())
    assert [usage["completion_tokens"] for usage in seen.usages] == list(NUM_TOKENS.values())
    for name, expected in (("prompt", num_prompt), ("generation", num_output)):
        assert seen.grown(f"vllm:{name}_tokens_total") == seen.grown(f"vllm:request_{name}_tokens_sum") == expected
    assert seen.grown("vllm:request_max_num_generation_tokens_sum") == num_output
    assert 0 < seen.grown("vllm:inter_token_latency_seconds_count") <= num_output - 2, "tokens of one piece are one gap"


def test_times_add_up(seen: Seen) -> None:
    parts = [seen.grown(f"vllm:request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode")]
    whole = seen.grown("vllm:e2e_request_latency_seconds_sum")
    assert all(part >= 0 for part in parts) and 0 < sum(parts) <= whole <= seen.elapsed_s
    assert 0 < seen.grown("vllm:time_to_first_token_seconds_sum") <= whole
    assert seen.grown("vllm:inter_token_latency_seconds_sum") <= whole


def test_ends_are_told_apart(seen: Seen) -> None:
    grown = {
        reason: seen.grown("vllm:request_success_total", finished_reason=reason)
        for reason in ("stop", "length", "abort", "error")
    }
    assert grown == {"stop": 0, "length": 2, "abort": 0, "error": 0}


def test_gauges_of_an_idle_server_are_zero(seen: Seen) -> None:
    assert [seen.after.value(name) for name in GAUGES] == [0, 0, 0]


def test_every_series_names_its_model(seen: Seen) -> None:
    names = [f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")]
    for name in (*names, *COUNTERS, *GAUGES):
        found = seen.after.find(name)
        assert found and all(sample.labels["model_name"] == "tiny" for sample in found), name
        assert all("engine" in sample.labels for sample in found), name


def test_the_encoded_image_is_a_stage(seen: Seen) -> None:
    name = "saccade:image_preprocess_seconds_count"
    counts = [sum(s.value for s in scrape.find(name, stage="vision")) for scrape in (seen.before, seen.after)]
    assert counts[1] - counts[0] == 1, "the text request had no images"

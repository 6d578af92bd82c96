"""Those who watch a server: its metrics, Grafana dashboard, traces and profiles, on a server with graphs."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import wait_idle
from tests.e2e.pictures import asked, encoded, image_part, picture
from tests.e2e.process import ServerProcess, running

ROOT = Path(__file__).parents[2]
TEXT: list[Any] = [{"role": "user", "content": "a text"}]
NAME = re.compile(r"\b(?:vllm|saccade):\w+")


@pytest.fixture(scope="module")
def watched(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("watched")
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 256, "encoder_budget_tokens": 64}
    engine = {"graphs": "vision=off", "verify": "off"}  # so that some passes have no graph
    with running(checkpoint, folder / "log", server={"admin_api_key": "boss"}, engine=engine, limits=limits) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def http(watched: ServerProcess) -> Iterator[httpx2.Client]:
    with watched.client() as client:
        yield client


def ask(http: httpx2.Client, messages: list[Any], num_tokens: int) -> dict[str, Any]:
    fields = {"messages": messages, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
    found = http.post("/v1/chat/completions", json=fields)
    assert found.status_code == 200, found.text
    answer: dict[str, Any] = found.json()
    return answer


def samples_of(http: httpx2.Client) -> dict[str, float]:
    """Sums over labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def test_steps_count_the_rows_they_compute(http: httpx2.Client) -> None:
    before = samples_of(http)
    usage = ask(http, [{"role": "user", "content": "steps"}], 5)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0 and usage["prompt_tokens"] <= 64
    wait_idle(http)
    after = samples_of(http)
    grown = {
        part: after[f"vllm:iteration_tokens_total_{part}"] - before[f"vllm:iteration_tokens_total_{part}"]
        for part in ("count", "sum")
    }
    assert grown == {"count": 5, "sum": usage["prompt_tokens"] + 4}, "the last token is no input"


def test_the_dashboard_queries_what_the_server_tells(http: httpx2.Client) -> None:
    ask(http, asked(image_part(encoded(picture(5)))), 3)
    board = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    queries += [variable["definition"] for variable in board["templating"]["list"] if "definition" in variable]
    assert len(queries) > 30
    told = samples_of(http).keys()
    for query in queries:
        names = set(NAME.findall(query))
        assert names and names <= told, f"{names - told} of {query}"


def test_openmetrics_are_told_to_those_who_ask(http: httpx2.Client) -> None:
    found = http.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    families = {family.name: family for family in openmetrics_families(found.text)}
    assert families["vllm:iteration_tokens_total"].type == "histogram"
    assert families["vllm:request_success"].type == "counter"

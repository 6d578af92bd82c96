"""Those who watch a server: its metrics, Grafana dashboard, traces and profiles, on a server with graphs."""

import gzip
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx2
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from saccade.cli import main
from tests.e2e.conftest import wait_idle
from tests.e2e.pictures import asked, encoded, image_part, picture
from tests.e2e.process import ServerProcess, running
from tests.e2e.trace_format import spans_of

ROOT = Path(__file__).parents[2]
TEXT: list[Any] = [{"role": "user", "content": "a text"}]
NAME = re.compile(r"\b(?:vllm|saccade):\w+")


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles") / "new"


@pytest.fixture(scope="module")
def watched(checkpoint: Path, profiles: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("watched")
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 256, "encoder_budget_tokens": 64}
    engine = {"graphs": "vision=off", "verify": "off"}  # so that some passes have no graph
    server = {"admin_api_key": "boss", "profile_folder": str(profiles)}
    with running(checkpoint, folder / "log", server=server, engine=engine, limits=limits) as found:
        found.wait_ready()
        yield found


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


NUM_TOKENS = 6
BOSS = {"authorization": "Bearer boss"}


@pytest.fixture(scope="module")
def recorded(watched: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A trace of the command line, with requests that begin before it, in it, and end in it or behind it."""
    file = tmp_path_factory.mktemp("trace") / "trace.json"
    stop = Event()

    def work(seed: int) -> None:
        with watched.client() as client:
            while not stop.is_set():
                ask(client, asked(image_part(encoded(picture(seed)))) if seed % 2 else TEXT, NUM_TOKENS)
                seed += 2

    with ThreadPoolExecutor(3) as pool:
        working = [pool.submit(work, seed) for seed in (100, 201, 302)]
        try:
            flags = ["--url", watched.url, "--seconds", "2", "--output", str(file), "--admin-api-key", "boss"]
            assert main(["trace", *flags]) == 0
        finally:
            stop.set()
        for one in working:
            one.result()
    document: dict[str, Any] = json.loads(file.read_text())
    return document


def test_a_trace_keeps_the_format(recorded: dict[str, Any]) -> None:
    tracks = spans_of(recorded)
    phases = {track.split()[1]: spans for (process, track), spans in tracks.items() if process == "engine"}
    assert {"vision", "prefill", "decode", "head"} <= phases.keys()
    assert recorded["otherData"]["dropped_events"] == 0
    counters = {event["name"] for event in recorded["traceEvents"] if event["ph"] == "C"}
    assert counters == {"requests", "KV cache in use"}


def test_a_trace_tells_graphs_padding_and_reasons(recorded: dict[str, Any]) -> None:
    passes = [event for event in recorded["traceEvents"] if event["ph"] == "X" and event["pid"] == 1]
    for one in passes:
        told = one["args"]
        assert 1 <= told["rows"] <= told["computed_rows"]
        assert told["padded_share"] == pytest.approx(1 - told["rows"] / told["computed_rows"], abs=1e-4)
        if one["name"].startswith("vision"):
            assert told["eager"] == "graphs are off"
        else:
            assert told["graph"].startswith(one["name"].split()[0]), "captured in this server"
    decoding = [one for one in passes if one["name"].startswith("decode")]
    assert {one["args"]["computed_rows"] for one in decoding} <= {1, 2}


def test_a_trace_tells_the_stages_of_requests(recorded: dict[str, Any]) -> None:
    requests = [spans for (process, _), spans in spans_of(recorded).items() if process == "requests"]
    whole = [spans for spans in requests if spans[0]["args"]["finish_reason"] == "length"]
    assert whole, "some ended while it was recorded"
    for spans in whole:
        names = [span["name"] for span in spans]
        assert names[0] == "request" and names[1] in ("prepare", "prepare media")
        assert names[2:] == ["queued", "prefill", "decode"]
        assert spans[0]["args"]["output_tokens"] == NUM_TOKENS
    assert {"prepare", "prepare media"} <= {spans[1]["name"] for spans in requests}


def test_a_trace_needs_the_administrator_and_sane_seconds(http: httpx2.Client) -> None:
    assert http.get("/trace?seconds=1").status_code == 403
    for wrong in ("0", "-1", "61", "nan", "many"):
        found = http.get(f"/trace?seconds={wrong}", headers=BOSS)
        assert found.status_code == 400 and found.json()["error"]["param"] == "seconds", wrong


def test_an_engine_that_rests_has_an_empty_trace(
    http: httpx2.Client, watched: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wait_idle(http)
    file = tmp_path / "trace.json"
    flags = ["--url", watched.url, "--seconds", "0.1", "--admin-api-key", "boss", "--output", str(file)]
    assert main(["trace", *flags]) == 0
    assert (
        spans_of(json.loads(file.read_text())) == {} and "nothing ran during the recording" in capsys.readouterr().err
    )


def test_a_profile_of_the_engine_is_written(http: httpx2.Client, profiles: Path) -> None:
    assert http.post("/start_profile").status_code == 403
    none = http.post("/stop_profile", headers=BOSS)
    assert none.status_code == 400 and "/start_profile" in none.json()["error"]["message"]
    begun = http.post("/start_profile", headers=BOSS)
    assert begun.status_code == 200 and begun.json()["folder"] == str(profiles)
    twice = http.post("/start_profile", headers=BOSS)
    assert twice.status_code == 400 and "/stop_profile" in twice.json()["error"]["message"]
    ask(http, TEXT, 3)
    ended = http.post("/stop_profile", headers=BOSS)
    file = Path(ended.json()["file"])
    assert file.parent == profiles
    with gzip.open(file) as content:
        names = {event.get("name") for event in json.load(content)["traceEvents"]}
    assert any(str(name).startswith("aten::") for name in names)
    assert ask(http, TEXT, 2)["usage"]["completion_tokens"] == 2, "it goes on"

"""`saccade bench serve`: figures against numbers worked out by hand, and whole runs against a scripted server."""

import asyncio
import io
import json
import os
import signal
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from saccade.bench.load import startup_server
from saccade.bench.load.client_reply import Outcome
from saccade.bench.load.load_settings import LoadSettings, TargetSettings, WorkloadSettings
from saccade.bench.load.metrics_text import parse_metrics
from saccade.bench.load.startup_server import LaunchedServer
from saccade.bench.load.workload import WorkloadPrompt
from saccade.bench.serving import serving_run, startup
from saccade.bench.serving.serving_command import bench_serve
from saccade.bench.serving.serving_run import ServingRun, Shown
from saccade.bench.serving.serving_settings import OutputSettings, ServingPlan, VariantSettings
from saccade.bench.serving.serving_stats import figures_of, peak_concurrency, split_stages, stage_figures
from saccade.bench.serving.serving_target import Reading, graphs_between, metrics_between
from saccade.bench.serving.serving_turns import run_serving
from saccade.bench.soak.soak_run import Soak
from saccade.cli import main
from saccade.cli.parser import Parser, settings_from
from saccade.errors import ConfigError
from tests.bench.scripted import Asked, Reply, Scripted, as_json, nobody, plain, serving, stream, stream_of

SMALL = WorkloadSettings(num_prompts=10, image_resolution="32x20", random_input_len=9, random_output_len=3)
SILENT = Shown(Console(quiet=True))
LOAD = LoadSettings(max_concurrency=3, warmup_requests=2)
ANSWERS = ("/v1/chat/completions", "/v1/models", "/version", "/server_info", "/graphs", "/metrics", "/tokenize")


def outcome(index: int, sent_s: float, times: tuple[float, ...], **facts: Any) -> Outcome:
    told: dict[str, Any] = {"output_tokens": len(times), "e2el_s": times[-1] if times else 0.0}
    return Outcome(index, sent_s, times[0] if times else 0.0, token_times_s=times, **(told | facts))


FOUR = [
    outcome(0, 0.0, (0.1, 0.2, 0.4), prompt_tokens=100, image_tokens=60, cached_tokens=8),
    outcome(1, 0.0, (0.3,), prompt_tokens=50, image_tokens=30),
    outcome(2, 0.5, (0.2, 1.2), prompt_tokens=70, image_tokens=60),
    outcome(3, 0.6, (), error="HTTP 503 queue_full", message="full"),
]
SAMPLES = [WorkloadPrompt("", 3, sizes=((8, 8),)) for _ in FOUR]


def test_figures_are_those_worked_out_by_hand() -> None:
    figures = figures_of(FOUR, SAMPLES, 2.0, percentiles=(50, 75))
    assert (figures["completed"], figures["failed"], figures["duration"]) == (3, 1, 2.0)
    assert figures["errors_by_kind"] == {"HTTP 503 queue_full": 1}
    assert (figures["request_throughput"], figures["image_throughput"]) == (1.5, 1.5)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (220, 6)
    assert (figures["total_input_vision_tokens"], figures["total_input_text_tokens"]) == (150, 70)
    assert (figures["input_throughput"], figures["output_throughput"]) == (110, 3)
    assert (figures["total_token_throughput"], figures["vision_token_throughput"]) == (113, 75)
    assert figures["total_cached_tokens"] == 8
    assert figures["mean_ttft_ms"] == pytest.approx(200) and figures["median_ttft_ms"] == pytest.approx(200)
    assert figures["std_ttft_ms"] == pytest.approx(np.sqrt(2 / 3) * 100)
    assert figures["p75_ttft_ms"] == pytest.approx(250) and figures["p99_ttft_ms"] == pytest.approx(298)
    assert figures["mean_tpot_ms"] == pytest.approx((150 + 1000) / 2)
    assert figures["mean_itl_ms"] == pytest.approx((100 + 200 + 1000) / 3)
    assert figures["median_itl_ms"] == pytest.approx(200) and figures["max_itl_ms"] == pytest.approx(1000)
    assert figures["mean_e2el_ms"] == pytest.approx((400 + 300 + 1200) / 3)
    assert figures["mean_e2e_latency_ms"] == figures["mean_e2el_ms"]
    assert figures["concurrency"] == pytest.approx(1.9 / 2)
    assert figures["max_output_tokens_per_s"] == 5 and figures["max_concurrent_requests"] == 2
    assert figures["request_goodput"] is None
    assert len(figures["ttft_quantiles_ms"]) == 101 and figures["ttft_quantiles_ms"][50] == pytest.approx(200)


def test_figures_of_nothing_are_none_and_not_zero() -> None:
    figures = figures_of(FOUR[3:], [WorkloadPrompt("", 1)] * 4, 1.0)
    assert figures["completed"] == 0 and figures["failed"] == 1 and figures["request_throughput"] == 0
    assert figures["mean_ttft_ms"] is None and figures["p99_e2el_ms"] is None and figures["ttft_quantiles_ms"] == []
    json.dumps(figures, allow_nan=False)


def test_vision_tokens_are_not_guessed() -> None:
    silent = [replace(each, image_tokens=None, prompt_tokens=None) for each in FOUR]
    figures = figures_of(silent, [replace(sample, text_tokens=5) for sample in SAMPLES], 1.0)
    assert figures["vision_token_throughput"] is None and figures["total_input_tokens"] == 15


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({"ttft": 250}, 2),
        ({"ttft": 300.1}, 3),
        ({"e2el": 500}, 2),
        ({"itl": 150}, 1),  # a request of one token has no gap to keep
        ({"tpot": 200, "ttft": 150}, 1),
        ({"ttft": 1}, 0),
    ],
)
def test_goodput_counts_requests_that_keep_to_every_limit(limits: dict[str, float], good: int) -> None:
    assert figures_of(FOUR, SAMPLES, 2.0, limits_ms=limits)["request_goodput"] == good / 2


def test_percentiles_are_numpys() -> None:
    rng = np.random.default_rng(11)
    times = rng.exponential(1.0, 300)
    outcomes = [outcome(i, 0.0, (float(time),)) for i, time in enumerate(times)]
    figures = figures_of(outcomes, [WorkloadPrompt("", 1)] * 300, 5.0, percentiles=(5, 99.9))
    for point in (5, 99, 99.9):
        assert figures[f"p{point:g}_ttft_ms"] == pytest.approx(np.percentile(times * 1e3, point))


def test_requests_that_touch_do_not_overlap() -> None:
    chain = [outcome(i, float(i), (1.0,)) for i in range(5)]
    assert peak_concurrency(chain) == 1
    assert peak_concurrency([*chain, outcome(9, 0.5, (3.0,))]) == 2


def test_stages_add_up_to_the_whole_time() -> None:
    timings = {"parse": 0.01, "fetch": 0.02, "preprocess": 0.03, "receive": 0.005, "prepare": 0.08}
    told = timings | {"queue": 0.1, "prefill": 0.2, "total": 0.4, "first_token": 0.39}
    stages = split_stages(told, 0.5)
    assert sum(stages.values()) == pytest.approx(0.5)
    assert list(stages) == [
        *("receive", "parse", "fetch", "preprocess", "wait for a thread"),
        *("queue", "prefill", "rest of the server", "client and network"),
    ]
    assert stages["wait for a thread"] == pytest.approx(0.02)
    assert stages["rest of the server"] == pytest.approx(0.4 - 0.005 - 0.08 - 0.3)
    assert stages["client and network"] == pytest.approx(0.1)
    assert split_stages({"queue": 0.1}, 0.3) == {"queue": 0.1, "client and network": pytest.approx(0.2)}


def test_vision_is_a_part_of_prefill() -> None:
    stages = split_stages({"prefill": 0.3, "vision": 0.1, "total": 0.35}, 0.4)
    assert (stages["vision"], stages["prefill"]) == pytest.approx((0.1, 0.2))
    assert stages["rest of the server"] == pytest.approx(0.05)
    assert split_stages({"prefill": 0.1, "vision": 0.3}, 0.4)["prefill"] == 0.0


def test_stage_figures_are_over_requests_that_told() -> None:
    told = [outcome(i, 0.0, (1.0,), timings={"queue": 0.1 * i}) for i in range(3)]
    stages = stage_figures([*told, outcome(9, 0.0, (5.0,))])
    assert stages["queue"]["mean_ms"] == pytest.approx(100) and stages["queue"]["share"] == pytest.approx(0.1)
    assert stages["client and network"]["median_ms"] == pytest.approx(900)
    assert stage_figures([outcome(9, 0.0, (5.0,))]) == {}


def phase(replays: int, large: int, real: int, padded: int) -> dict[str, Any]:
    graphs = [{"key": "a", "bytes": 2**20}, {"key": "b", "bytes": 2**21}]
    counts = {"replays": {"capacity": replays, "exact": 1}, "fallbacks": {"too_large": large} if large else {}}
    return {"phase": "vision", **counts, "real_rows": real, "padded_rows": padded, "captures": 2, "graphs": graphs}


def test_graphs_are_counted_between_two_readings() -> None:
    other = {"phase": "late", "replays": 4, "fallbacks": 0}
    [vision, late] = graphs_between(Reading([phase(5, 0, 100, 10)]), Reading([phase(25, 3, 300, 60), other]))
    assert (vision["replays"], vision["fallbacks"], vision["fallbacks_by_reason"]) == (20, 3, {"too_large": 3})
    assert (vision["real_rows"], vision["padded_rows"], vision["padding"]) == (200, 50, 0.25)
    assert (vision["graphs"], vision["graph_bytes"], vision["captures"]) == (2, 3 * 2**20, 0)
    assert (late["phase"], late["replays"], late["fallbacks"], late["padding"]) == ("late", 4, 0, 0.0)


METRICS = """# HELP a help text
# TYPE a:seconds histogram
a:seconds_bucket{{le="1.0"}} 5
a:seconds_sum{{model="m"}} {sum}
a:seconds_count{{model="m"}} {count}
# TYPE a:done counter
a:done_total {count}
# TYPE a:memory_bytes gauge
a:memory_bytes 5e6
a:odd NaNs
"""


def test_metrics_are_counted_between_two_readings() -> None:
    first, second = (parse_metrics(METRICS.format(sum=total, count=count)) for total, count in ((1.5, 3), (4.5, 9)))
    assert second[1] == {"a:memory_bytes": 5e6}
    changes = metrics_between(Reading(metrics=first[0]), Reading(metrics=second[0]))
    assert changes == {'a:seconds_sum{model="m"}': 3.0, 'a:seconds_count{model="m"}': 6.0, "a:done_total": 6.0}


def test_lines_that_are_no_metrics_are_left_out() -> None:
    assert parse_metrics("# TYPE a\n# TYPE a gauge x\n# TYPE b gauge\nb nothing\nb 2\n}\n") == ({}, {"b": 2.0})


def count_letters(asked: Asked) -> int:
    """A token a letter; a chat template adds ten."""
    if asked.path != "/tokenize":
        return 0
    body = asked.json
    return len(body["prompt"]) if "prompt" in body else 10 + len(body["messages"][0]["content"])


class Script:
    """A whole server: model, tokenizer (a token a letter), graphs, metrics; answers in words, some of them refused."""

    def __init__(self, *, is_saccade: bool = True, paths: tuple[str, ...] = ANSWERS, fail_every: int = 0) -> None:
        self.is_saccade, self.paths, self.fail_every = is_saccade, paths, fail_every
        self.count = 0

    async def __call__(self, asked: Asked) -> Reply:
        if asked.path not in self.paths:
            yield as_json({"error": {"message": "no such route"}}, 404)
        elif asked.path == "/v1/chat/completions":
            async for data in self.chat(asked.json):
                yield data
        elif asked.path == "/metrics":
            yield plain(200, METRICS.format(sum=self.count / 2, count=self.count).encode(), "text/plain")
        else:
            owner = "saccade" if self.is_saccade else "other"
            yield as_json(
                {
                    "/v1/models": {"data": [{"id": "tiny", "owned_by": owner, "max_model_len": 512}]},
                    "/version": {"version": "1.2"},
                    "/server_info": {"gpu": "none"},
                    "/graphs": {"phases": [phase(self.count, 0, 10 * self.count, self.count)]},
                    "/tokenize": {"count": count_letters(asked)},
                    "/flush_cache": {},
                }[asked.path]
            )

    async def chat(self, body: Any) -> Reply:
        self.count += 1
        if self.fail_every and self.count % self.fail_every == 0:
            yield as_json({"error": {"message": "try later", "code": "queue_full"}}, 503)
            return
        words = ["a"] * body["max_completion_tokens"]
        timings = {"queue_ms": 1.0, "total_ms": 2.0} if body.get("timings") else None
        async for data in stream(stream_of(*words, prompt=50, images=20, timings=timings)):
            yield data


@pytest.fixture(scope="module")
def finished() -> Iterator[tuple[ServingRun, Scripted]]:
    with serving(Script()) as server:
        yield run_serving(ServingPlan(TargetSettings(base_url=server.url), SMALL, LOAD), SILENT, name="one"), server


def test_a_run_sends_the_workload_behind_a_warm_up_of_other_requests(finished: tuple[ServingRun, Scripted]) -> None:
    run, server = finished
    bodies = [json.dumps(body) for body in server.bodies()]
    assert len(bodies) == 12 == len(set(bodies))
    images = [body["messages"][0]["content"][0]["image_url"]["url"] for body in server.bodies()]
    assert len(set(images)) == 12
    assert all(body["model"] == "tiny" and body["timings"] is True for body in server.bodies())
    assert run.figures["completed"] == 10 and run.failed == 0 and len(run.outcomes) == 10
    assert run.figures["total_input_tokens"] == 500 and run.figures["total_input_vision_tokens"] == 200
    asked = [body["max_completion_tokens"] for body in server.bodies()][2:]
    assert sorted(each.output_tokens for each in run.outcomes) == sorted(asked)


def test_texts_have_the_tokens_that_the_servers_tokenizer_counts(finished: tuple[ServingRun, Scripted]) -> None:
    run, server = finished
    texts = [body["messages"][0]["content"][-1]["text"] for body in server.bodies()][2:]
    asked = sorted(max(sample.text_tokens or 0, 3) for sample in run.samples)
    lengths = sorted(map(len, texts))  # a token a letter: "the" are three, and " go" is the shortest word
    assert all(length - most in (0, 1, 2) for length, most in zip(lengths, asked, strict=True))
    assert max(asked) <= 9


def test_a_run_knows_what_the_server_told(finished: tuple[ServingRun, Scripted]) -> None:
    run, _ = finished
    [vision] = run.graphs
    assert (vision["replays"], vision["real_rows"], vision["padding"]) == (10, 100, 0.1)
    assert run.metrics["a:done_total"] == 10 and run.gauges["a:memory_bytes"] == 5e6
    assert run.stages["queue"]["mean_ms"] == pytest.approx(1.0)
    assert run.stages["rest of the server"]["mean_ms"] == pytest.approx(1.0)
    assert run.environment["model"] == "tiny" and run.environment["server_info"] == {"gpu": "none"}


def test_texts_are_tokenized_again_by_the_server(finished: tuple[ServingRun, Scripted]) -> None:
    """A token a letter: an answer of n words "a" has n of them. Several texts are counted at the same time."""
    run, server = finished
    total = run.figures["total_output_tokens"]
    assert run.figures["total_output_tokens_retokenized"] == total > 0
    assert run.figures["output_throughput_retokenized"] == pytest.approx(run.figures["output_throughput"])
    texts = [asked.json.get("prompt", "") for asked in server.asked if asked.path == "/tokenize"]
    assert sorted(text for text in texts if set(text) == {"a"}) == sorted({o.text for o in run.outcomes})


def test_caches_are_emptied_behind_the_warm_up_where_that_is_asked_for() -> None:
    load = replace(LOAD, flush_cache=True)
    with serving(Script(paths=(*ANSWERS, "/flush_cache"))) as server:
        run_serving(ServingPlan(TargetSettings(base_url=server.url), SMALL, load), SILENT)
        sent = [asked.path for asked in server.asked if asked.path in ("/v1/chat/completions", "/flush_cache")]
        assert sent == ["/v1/chat/completions"] * 2 + ["/flush_cache"] + ["/v1/chat/completions"] * 10
    with serving(Script()) as server, pytest.raises(ConfigError, match="HTTP 404 from /flush_cache; --flush-cache"):
        run_serving(ServingPlan(TargetSettings(base_url=server.url), SMALL, load), SILENT)


def test_any_server_with_the_chat_route_can_be_asked() -> None:
    with serving(Script(is_saccade=False, paths=("/v1/chat/completions",))) as server:
        target = TargetSettings(base_url=f"{server.url}/v1", model="theirs")
        run = run_serving(ServingPlan(target, SMALL, LOAD), SILENT)
        assert run.figures["completed"] == 10 and run.graphs == [] and run.metrics == {} and run.stages == {}
        assert run.figures["total_output_tokens_retokenized"] is None
        assert all(body["model"] == "theirs" and "timings" not in body for body in server.bodies())
        with pytest.raises(ConfigError, match="--model"):
            run_serving(ServingPlan(TargetSettings(base_url=server.url), SMALL, LOAD), SILENT)


@pytest.mark.parametrize(
    ("status", "key", "message"),
    [
        (401, "", r"http://127\.0\.0\.1:\d+ asks for a key \(HTTP 401\); .*--api-key or OPENAI_API_KEY"),
        (401, "wrong", r"refuses the given key \(HTTP 401\)"),
        (403, "wrong", r"refuses the given key \(HTTP 403\)"),
        (404, "", r"does not say which model it serves \(HTTP 404 from /v1/models\); name one \(--model\)"),
        (200, "", r"does not say which model it serves; name one \(--model\)"),
    ],
)
def test_a_server_that_names_no_model_is_quoted(status: int, key: str, message: str) -> None:
    async def refuse(asked: Asked) -> Reply:
        yield as_json({"error": {"message": "no"}}, status)

    with serving(refuse) as server, pytest.raises(ConfigError, match=message):
        run_serving(ServingPlan(TargetSettings(base_url=server.url, api_key=key), SMALL, LOAD), SILENT)


def test_a_server_that_is_not_there_is_named() -> None:
    with nobody() as url:
        for model in ("", "named"):
            with pytest.raises(ConfigError, match=r"cannot be reached: .*is it up\? \(--base-url, --host, --port\)"):
                run_serving(ServingPlan(TargetSettings(base_url=url, model=model), SMALL, LOAD), SILENT)


@pytest.mark.parametrize(("flags", "sent"), [((), "Bearer common"), (("--api-key", "own"), "Bearer own")])
def test_the_key_of_openais_clients_is_sent_where_none_is_given(
    flags: tuple[str, ...], sent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "common")
    small = ["--num-prompts", "1", "--warmup-requests", "0", "--image-resolution", "20x32", *flags]
    with serving(Script()) as server:
        assert main(["bench", "serve", "--base-url", server.url, *small]) == 0
    assert {asked.headers.get("authorization") for asked in server.asked} == {sent}


def shown_by(
    target: TargetSettings, output: OutputSettings, variants: VariantSettings | None = None
) -> tuple[int, str]:
    text = io.StringIO()
    console = Console(file=text, width=200)
    code = bench_serve({"": ServingPlan(target, SMALL, LOAD, output)}, console, variants or VariantSettings())
    return code, text.getvalue()


def test_failures_are_counted_told_and_the_exit_code() -> None:
    with serving(Script(fail_every=4)) as server:
        code, text = shown_by(TargetSettings(base_url=server.url), OutputSettings())
    assert code == 1
    assert "Failed requests:                         3" in text
    assert "failed: 3 x HTTP 503 queue_full" in text and "try later" in text


def test_a_server_that_refuses_the_warm_up_stops_the_benchmark() -> None:
    with serving(Script(fail_every=1)) as server, pytest.raises(ConfigError, match="queue_full: try later"):
        run_serving(ServingPlan(TargetSettings(base_url=server.url), SMALL, LOAD), SILENT)


def test_what_is_saved_can_be_compared_with(tmp_path: Path) -> None:
    first = OutputSettings(save_result=True, save_detailed=True, result_dir=str(tmp_path), result_filename="a.json")
    with serving(Script()) as server:
        target = TargetSettings(base_url=server.url, api_key="secret")
        assert shown_by(target, first)[0] == 0
        second = OutputSettings(compare=str(tmp_path / "a.json"), report=str(tmp_path / "r.html"), label="now")
        code, text = shown_by(target, second)
    assert code == 0 and "compared with earlier" in text and "requests/s" in text
    saved = json.loads((tmp_path / "a.json").read_text())
    assert len(saved["ttfts"]) == 10 == saved["completed"] == saved["num_prompts"]
    assert "secret" not in (tmp_path / "a.json").read_text() + (tmp_path / "r.html").read_text()
    with pytest.raises(ConfigError, match="--compare"):
        shown_by(target, OutputSettings(compare=str(tmp_path / "missing.json")))


FAKE_SERVER = """
    import asyncio, sys
    from tests.bench.test_serving import Script
    from tests.bench.scripted import serving
    import signal, threading
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with serving(Script(fail_every=4 if "--fails" in sys.argv else 0)) as server:
        print("listening on", server.url, flush=True)
        print("loading: 0.10 s", flush=True)
        if "--broken" in sys.argv:
            sys.exit("saccade: cannot start: " + " ".join(sys.argv[1:]))
        print("ready on", server.url, "after 0.20 s", flush=True)
        stop.wait(600)
        print("shutting down", flush=True)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that are started are scripted ones, in processes of their own."""
    path = tmp_path / "fake.py"
    path.write_text(textwrap.dedent(FAKE_SERVER))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    monkeypatch.setattr(startup_server, "SERVE", (sys.executable, str(path)))


@pytest.mark.usefixtures("fake")
def test_variants_are_started_measured_and_compared(tmp_path: Path) -> None:
    variants = VariantSettings(
        serve_model="m", serve_args="--all 1", variants="good:; bad: --fails --graphs a=off,b=off"
    )
    output = OutputSettings(result_dir=str(tmp_path), result_filename="x.json", report=str(tmp_path / "r.html"))
    code, text = shown_by(TargetSettings(), output, variants)
    assert code == 1 and "compared with good" in text and "failed: 3 x HTTP 503" in text
    good, bad = (json.loads((tmp_path / f"x-{name}.json").read_text()) for name in ("good", "bad"))
    assert (good["failed"], bad["failed"]) == (0, 3) and good["environment"]["time_to_ready_s"] > 0
    assert good["environment"]["serve_flags"] == "--all 1"
    assert bad["environment"]["serve_flags"] == "--all 1 --fails --graphs a=off,b=off"
    page = (tmp_path / "r.html").read_text()
    assert "good" in page and "bad" in page


@pytest.mark.usefixtures("fake")
def test_a_variant_that_does_not_start_leaves_the_figures_of_those_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--num-prompts 3 --image-resolution 32x20 --random-input-len 20"
    files = ["--report", str(tmp_path / "r.html"), "--json", str(tmp_path / "x.json")]
    assert main(["bench", "serve", "--variants", "good:; bad: --broken", *flags.split(), *files]) == 2
    shown = capsys.readouterr()
    assert "Successful requests:                     3" in shown.out
    assert "INCOMPLETE, not finished: bad" in shown.out and "INCOMPLETE" in (tmp_path / "r.html").read_text()
    assert "\ngood: " in shown.err and shown.err.index("\ngood: ") < shown.err.index("starting bad")
    assert json.loads((tmp_path / "x-good.json").read_text())["completed"] == 3


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("command", "out"),
    [
        ("serve --variants a:;b: --num-prompts 3 --image-resolution 32x20", "INCOMPLETE: nothing was finished\n"),
        ("startup", ""),
        ("soak --minutes 5", ""),
    ],
)
def test_sigterm_stops_the_server_that_was_started(
    command: str, out: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped: list[LaunchedServer] = []

    async def terminated(*given: Any, **how: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        await asyncio.Event().wait()

    def stop(server: LaunchedServer) -> None:
        original(server)
        stopped.append(server)

    original = LaunchedServer.stop
    monkeypatch.setattr(LaunchedServer, "stop", stop)
    monkeypatch.setattr(serving_run, "drive", terminated)
    monkeypatch.setattr(startup, "describe", terminated)
    monkeypatch.setattr(Soak, "_describe", terminated)
    assert main(["bench", *command.split()]) == 143
    shown = capsys.readouterr()
    assert shown.out == out and "starting b" not in shown.err
    [server] = stopped
    assert server.last_lines.endswith("shutting down") and server.has_ended


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("command", ["startup", "soak"])
def test_without_a_model_the_server_chooses_the_bundled_one_with_its_limits(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", command, "--serve-args=--broken"]) == 2
    assert "saccade: cannot start: --port 0 --broken" in capsys.readouterr().err


@pytest.mark.usefixtures("fake")
def test_a_server_that_does_not_start_tells_why() -> None:
    with pytest.raises(ConfigError, match=r"exit code 1.*\n(.*\n)*saccade: cannot start: m --port 0 --broken"):
        shown_by(TargetSettings(), OutputSettings(), VariantSettings(serve_model="m", serve_args="--broken"))
    with pytest.raises(ConfigError, match=r"is not ready after 0\.01 s"), LaunchedServer("m", timeout_s=0.01):
        pass


@pytest.mark.parametrize(
    ("kind", "name", "value", "flag"),
    [
        (TargetSettings, "backend", "trt", "--backend"),
        (TargetSettings, "port", 0, "--port"),
        (TargetSettings, "extra_request_body", "[1]", "extra_request_body"),
        (LoadSettings, "request_rate", 0.0, "--request-rate"),
        (LoadSettings, "max_concurrency", -1, "--max-concurrency"),
        (OutputSettings, "goodput", "ttft", "goodput"),
        (OutputSettings, "goodput", "speed:5", "--goodput"),
        (OutputSettings, "percentile_metrics", "ttft,speed", "--percentile-metrics"),
        (OutputSettings, "metric_percentiles", "101", "metric_percentiles"),
        (VariantSettings, "variants", "a:;a:", "--variants"),
        (VariantSettings, "variants", "no colon", "--variants"),
    ],
)
def test_wrong_settings_name_their_flag(kind: type[Any], name: str, value: Any, flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        kind(**{name: value})


def test_the_flags_of_the_known_benchmark_are_taken() -> None:
    parser = Parser("bench serve")
    groups = (TargetSettings, WorkloadSettings, LoadSettings, OutputSettings, VariantSettings)
    for group in groups:
        parser.add_settings(group)
    assert len(parser.kinds) == sum(len(fields(group)) for group in groups)  # no two groups share a flag
    line = (
        "--backend sglang-oai-chat --dataset-name image --image-resolution 560x560 --image-format jpeg --image-count 1 "
        "--image-content random --random-input-len 128 --random-output-len 1 --random-range-ratio 0.1 "
        "--num-prompts 256 --max-concurrency 32 --warmup-requests 5 --request-rate inf --host 127.0.0.1 --port 30000 "
        "--seed 3 --ignore-eos"
    )
    flags = parser.read(line.split())
    target, workload = settings_from(flags, TargetSettings), settings_from(flags, WorkloadSettings)
    assert (target.url, target.path) == ("http://127.0.0.1:30000", "/v1/chat/completions")
    assert workload == WorkloadSettings(seed=3)
    assert settings_from(flags, LoadSettings) == LoadSettings()
    assert not settings_from(flags, VariantSettings).is_used

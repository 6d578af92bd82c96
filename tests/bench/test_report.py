"""What a benchmark prints and writes: the familiar block and keys, comparisons, and a page that needs nothing else."""

import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from saccade.bench.load.client_reply import Outcome
from saccade.bench.load.load_settings import TargetSettings
from saccade.bench.load.workload import WorkloadPrompt
from saccade.bench.serving.html import page
from saccade.bench.serving.html_charts import bar, distribution, ticks, timeline
from saccade.bench.serving.serving_report import block, clock_table, print_run
from saccade.bench.serving.serving_results import as_data, comparison_table, load, save
from saccade.bench.serving.serving_run import ServingRun, Shown
from saccade.bench.serving.serving_settings import OutputSettings, ServingPlan
from saccade.bench.serving.serving_stats import figures_of, stage_figures
from saccade.bench.serving.startup import TimedStart, print_startup, stages_of, verdict
from saccade.errors import ConfigError

EVIL = "<script>alert(1)</script>&\"'"


def make_run(name: str = "one", seed: int = 0, *, scale: float = 1.0, failures: int = 2) -> ServingRun:
    rng = np.random.default_rng(seed)
    outcomes = []
    for index in range(40):
        times = tuple(float(time) for time in np.cumsum(rng.uniform(0.01, 0.2, 4)) * scale)
        facts: dict[str, Any] = {"output_tokens": 4, "prompt_tokens": 90, "image_tokens": 70, "text": EVIL}
        if index < failures:
            facts = {"error": f"HTTP 400 {EVIL}", "message": EVIL}
        timings = {"queue": times[0] / 2, "vision": times[0] / 4}
        outcomes.append(Outcome(index, index * 0.05, times[0], times[-1], times, timings=timings, **facts))
    samples = [WorkloadPrompt("", 4, 20, ((560, 560),)) for _ in outcomes]
    phase = {"phase": "vision", "replays": 5, "fallbacks": 1, "fallbacks_by_reason": {"too_large": 1}, "captures": 0}
    plan = ServingPlan(TargetSettings(api_key="secret"), output=OutputSettings(metric_percentiles="50,99.9"))
    return ServingRun(
        name=name,
        figures=figures_of(outcomes, samples, 3.0, percentiles=(50, 99.9)),
        outcomes=outcomes,
        samples=samples,
        stages=stage_figures([each for each in outcomes if each.is_ok]),
        graphs=[phase | {"real_rows": 10, "padded_rows": 1, "padding": 0.1, "graphs": 2, "graph_bytes": 2**22}],
        metrics={"saccade:x_seconds_sum": 2.0, "saccade:x_seconds_count": 4.0, "vllm:x_seconds_sum": 2.0},
        gauges={"gpu_memory_bytes": 3 * 2**20},
        environment={"date": "2030-01-02T03:04:05+00:00", "model": f"m {EVIL}", "server_info": {"a": EVIL}},
        settings=plan.as_data(),
    )


RUN = make_run()


def test_the_block_has_the_lines_that_scripts_look_for() -> None:
    lines = block(RUN)
    assert lines[0] == "============ Serving Benchmark Result ============" and lines[-1] == "=" * 50
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    numbers = {name: value.strip() for name, value in found.items()}
    assert numbers["Successful requests"] == "38" and numbers["Failed requests"] == "2"
    assert numbers["Request throughput (req/s)"] == f"{38 / 3:.2f}"
    assert numbers["Total input vision tokens"] == str(38 * 70) and numbers["Max request concurrency"] == "32"
    assert numbers["Mean TTFT (ms)"] == f"{RUN.figures['mean_ttft_ms']:.2f}"
    assert numbers["P99.9 E2E Latency (ms)"] == f"{RUN.figures['p99.9_e2el_ms']:.2f}"
    assert numbers["Traffic request rate"] == "inf" and "Request goodput (req/s)" not in numbers
    assert "-----Time per Output Token (excl. 1st token)------" in lines
    assert all(line[40] == " " for line in lines if ": " in line)


SGLANG_LINES = """Backend|Traffic request rate|Max request concurrency|Successful requests|Benchmark duration (s)
Total input tokens|Total input text tokens|Total input vision tokens|Total generated tokens
Total generated tokens (retokenized)|Request throughput (req/s)|Input token throughput (tok/s)
Output token throughput (tok/s)|Peak output token throughput (tok/s)|Peak concurrent requests
Total token throughput (tok/s)|Concurrency|Mean E2E Latency (ms)|Median E2E Latency (ms)|P90 E2E Latency (ms)
P99 E2E Latency (ms)|Mean TTFT (ms)|Median TTFT (ms)|P99 TTFT (ms)|Mean TPOT (ms)|Median TPOT (ms)|P99 TPOT (ms)
Mean ITL (ms)|Median ITL (ms)|P95 ITL (ms)|P99 ITL (ms)|Max ITL (ms)""".replace("\n", "|").split("|")


@pytest.mark.parametrize("output_len", [1, 4])
def test_the_block_has_every_line_of_sglangs(output_len: int) -> None:
    """Also where answers of one token leave nothing to measure between tokens."""
    outcomes = [
        replace(each, output_tokens=output_len, token_times_s=each.token_times_s[:output_len])
        for each in make_run(failures=0).outcomes
    ]
    figures = figures_of(outcomes, RUN.samples, 3.0, percentiles=(50, 99.9), retokenized=7)
    lines = block(replace(RUN, outcomes=outcomes, figures=figures))
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    assert [name for name in SGLANG_LINES if name not in found] == []
    assert found["Total generated tokens (retokenized)"].strip() == "7"
    for name, key in (("P95 ITL (ms)", "p95_itl_ms"), ("Max ITL (ms)", "max_itl_ms")):
        assert found[name].strip() == ("n/a" if output_len == 1 else f"{figures[key]:.2f}")
    assert found["P90 E2E Latency (ms)"].strip() == f"{figures['p90_e2el_ms']:.2f}"


def test_the_tables_have_what_the_server_told() -> None:
    text = io.StringIO()
    print_run(RUN, Console(file=text, width=160))
    shown = text.getvalue()
    for part in ("where the time of a request goes", "queue", "too_large 1", "10.0%", "gpu_memory_bytes: 3 MiB"):
        assert part in shown
    assert f"failed: 2 x HTTP 400 {EVIL}, first request 0: {EVIL}" in shown
    assert shown.count("x_seconds") == 1  # the same clock under two names is shown once
    assert clock_table({}, 1.0) is None
    table = clock_table(
        {
            "busy_seconds_total": 1.5,
            'saccade:a_seconds_sum{engine="0",stage="x",model_name="m"}': 1.0,
            'saccade:a_seconds_count{engine="0",stage="x",model_name="m"}': 4.0,
            "n_total": 2.0,
        },
        3.0,
    )
    assert table is not None
    cells = [list(column.cells) for column in table.columns]
    assert cells == [
        ["busy_seconds", "a_seconds stage=x"],
        ["", "4"],
        ["1.500", "1.000"],
        ["50.0%", "33.3%"],
        ["", "250.000"],
    ]


@pytest.mark.parametrize("width", [40, 80])
def test_clocks_are_named_in_full_however_narrow_the_terminal(width: int) -> None:
    stages = ("decode_media", "preprocess", "receive")
    metrics = {f'saccade:image_preprocess_seconds_sum{{stage="{stage}"}}': 1.0 for stage in stages}
    metrics |= {f'saccade:image_preprocess_seconds_count{{stage="{stage}"}}': 3.0 for stage in stages}
    gauges = {'saccade:graph_memory_bytes{phase="prefill"}': 2.0**21}
    text = io.StringIO()
    print_run(replace(make_run(failures=0), metrics=metrics, gauges=gauges), Console(file=text, width=width))
    shown = text.getvalue()
    for stage in stages:
        assert f"stage={stage}" in shown
    assert "…" not in shown and "saccade:" not in shown and "graph_memory_bytes phase=prefill: 2 MiB" in shown


def test_a_bar_is_for_terminals_only() -> None:
    text = io.StringIO()
    with Shown(Console(file=text, force_terminal=False)).counting(3) as tick:
        tick(RUN.outcomes[0])
    assert text.getvalue() == "sending 3 requests\n"
    with Shown(Console(file=text, force_terminal=True, width=100)).counting(3) as tick:
        tick(RUN.outcomes[0])
    assert "1 failed" in text.getvalue() and "1/3" in text.getvalue()


def test_the_file_has_the_keys_of_both_benchmarks(tmp_path: Path) -> None:
    path = save(RUN, OutputSettings(result_dir=str(tmp_path / "new"), save_detailed=True))
    assert path.name == "openai-chat-infqps-one-20300102-030405.json"
    data = json.loads(path.read_text())
    for key in ("completed", "failed", "duration", "request_throughput", "output_throughput", "total_token_throughput"):
        assert data[key] == RUN.figures[key]
    for metric in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{word}_{metric}_ms" for word in ("mean", "median", "std", "p99")} <= data.keys()
    assert {"mean_e2e_latency_ms", "p99_e2e_latency_ms", "concurrency", "total_input_vision_tokens"} <= data.keys()
    assert {"max_output_tokens_per_s", "max_concurrent_requests", "model_id", "request_rate"} <= data.keys()
    assert len(data["ttfts"]) == len(data["itls"]) == len(data["input_lens"]) == len(data["errors"]) == 40
    assert data["errors"][0].startswith("HTTP 400") and data["errors"][5] == ""
    assert "ttfts" not in as_data(RUN) and "secret" not in path.read_text()
    assert load(str(path))["mean_e2el_ms"] == RUN.figures["mean_e2el_ms"]


def test_results_of_the_other_benchmarks_can_be_compared_with(tmp_path: Path) -> None:
    path = tmp_path / "sglang.jsonl"
    path.write_text('{"request_throughput": 1}\n{"request_throughput": 2.0, "mean_e2e_latency_ms": 5.0}\n')
    assert load(str(path))["request_throughput"] == 2.0 and load(str(path))["mean_e2el_ms"] == 5.0
    for wrong in ("", "[]", '{"a": 1}', "no json"):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match="--compare"):
            load(str(path))


def test_a_gain_above_one_is_better_whatever_the_figure() -> None:
    runs: list[dict[str, Any]] = [
        {"request_throughput": 10.0, "mean_ttft_ms": 100.0, "p99_ttft_ms": 50.0, "failed": 0},
        {"request_throughput": 15.0, "mean_ttft_ms": 50.0, "p99_ttft_ms": 100.0, "failed": 2},
        {"request_throughput": 10.1, "mean_ttft_ms": None},
    ]
    table = comparison_table(list(zip(("old", "new", "third"), runs, strict=True)))
    rows = {cells[0]: cells[1:] for cells in zip(*(column.cells for column in table.columns), strict=True)}
    assert table.title == "compared with old: a gain above 1 is better"
    assert rows["requests/s"] == ("10.00", "15.00", "[green]1.50x[/]", "10.10", "[default]1.01x[/]")
    assert rows["mean TTFT ms"] == ("100.00", "50.00", "[green]2.00x[/]", "", "")
    assert rows["p99 TTFT ms"] == ("50.00", "100.00", "[red]0.50x[/]", "", "")
    assert rows["failed"] == ("0.00", "2.00", "", "", "") and "median ITL ms" not in rows


class Checker(HTMLParser):
    """Counts elements, refuses what is not closed, and keeps every reference."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.references: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [str(value) for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def checked(text: str) -> Checker:
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert not checker.open
    return checker


@pytest.mark.parametrize("runs", [[RUN], [RUN, make_run("two", 1, scale=0.5, failures=0)], [replace(RUN, name="")]])
@pytest.mark.parametrize("has_earlier", [False, True])
def test_the_page_is_whole_offline_and_safe(runs: list[ServingRun], has_earlier: bool) -> None:
    named = [(run.name or "unnamed", as_data(run)) for run in runs]
    named = [("before", as_data(make_run("before", 2))), *named] if has_earlier else named
    text = page(runs, named, comparison_table(named) if len(named) > 1 else None)
    found = checked(text)
    assert found.references == [] and not {"script", "link", "iframe", "img", "object"} & set(found.tags)
    assert not re.search(r"https?://|url\(|@import", text)
    words = " ".join(found.words)
    for part in ("Time to First Token", "Inter-Token Latency", "End-to-End Latency", "Environment", "Settings: load"):
        assert part in words
    assert EVIL in words and "secret" not in text  # as text, not as an element
    assert found.tags.count("polyline") == 4 * (len(runs) + has_earlier)
    assert ("Compared with" in words) == (len(runs) + has_earlier > 1)
    assert found.tags.count("svg") == 4 + 2 * len(runs)


def test_a_page_of_nothing_but_failures_is_written() -> None:
    run = make_run(failures=40)
    found = checked(page([run], [("one", as_data(run))]))
    assert not any("TTFT" in line for line in block(run))
    assert "polyline" not in found.tags and "Failures" in " ".join(found.words)


def test_a_distribution_is_drawn_from_its_quantiles() -> None:
    drawn = distribution("t", [("a", [0.0, 50.0, 100.0]), ("none", [])])
    [points] = re.findall(r'<polyline points="([^"]*)"', drawn)
    [(x0, y0), (x1, y1), (x2, y2)] = [tuple(map(float, pair.split(","))) for pair in points.split()]
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.02) and y0 - y1 == pytest.approx(y1 - y2, abs=0.02) and y0 > y2
    assert "median 50.0 ms" in drawn and distribution("t", [("none", [])]) == ""


def test_a_timeline_has_a_row_a_request() -> None:
    drawn = checked(timeline("t", RUN.outcomes))
    assert drawn.tags.count("rect") == 2 + 38 * 2  # failed ones have one part
    assert timeline("t", []) == ""
    widths = re.findall(r'width="([\d.]+)" height="22"', bar([("a", 0.25), ("b", -0.1), ("c", 0.75)]))
    assert [float(width) for width in widths] == [285.0, 0.0, 855.0]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0.013), (0, 5231), (0, 100), (3, 3), (0, 7e-9)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 1 <= len(found) <= 8 and all(low <= tick <= high * (1 + 1e-9) for tick in found)
    assert found == sorted(set(found))


LINES = [
    (1.5, "listening on http://127.0.0.1:5"),
    (1.75, "finding the model: 0.25 s"),
    (2.0, "12:00 INFO something: 5 of 7 s left"),
    (4.0, "weights: 2.25 s"),
    (5.0, "capture: 1.00 s"),
    (5.5, "weights: 0.50 s"),
    (6.0, "ready on http://127.0.0.1:5 after 4.50 s"),
    (9.0, "shutting down: 3.00 s"),
]


def test_stages_of_a_start_follow_each_other_and_add_up() -> None:
    stages = stages_of(LINES)
    assert stages == {
        "process and imports": 1.5,
        "finding the model": 0.25,
        "weights": 2.25 + 0.5,
        "capture": 1.0,
        "open for requests": 0.5,
    }
    assert sum(stages.values()) == 6.0


def test_a_start_is_shown() -> None:
    first = TimedStart(stages_of(LINES), 6.0, [30.0, 10.0, 12.0, 10.0], [])
    second = TimedStart({"weights": 1.0, "other": 0.5}, 1.5, [10.0], ["request 2: timeout: late"])
    text = io.StringIO()
    print_startup([first, second], Console(file=text, width=160))
    shown = text.getvalue()
    for part in ("time to ready", "6.00", "1.50", "capture", "other", "failed: request 2: timeout: late"):
        assert part in shown
    loaded = TimedStart({"process and imports": 1.0, "loading weights": 2.5}, 6.0, [], [])
    assert verdict(1, loaded) == "start 2: ready after 6.00 s, 3.50 of them beyond loading weights"
    assert verdict(0, first).endswith("first request 30.0 ms, median of the others 10.0 ms (3.00x), last 10.0 ms")

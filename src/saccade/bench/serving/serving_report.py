"""What `saccade bench serve` prints: the usual block of figures, then tables of the server's own figures."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from saccade.bench.load.metrics_text import family_and_labels
from saccade.bench.serving.serving_run import ServingRun
from saccade.bench.serving.serving_settings import USUAL_PERCENTILES, OutputSettings
from saccade.bench.serving.serving_stats import percentile_name
from saccade.terminal import print_table

WIDTH = 50
MIB = 2**20
CLOCK_END = re.compile(r"_(sum|total)(?=\{|$)")
SAME_FOR_ALL = ("model_name", "engine")
TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-Token Latency",
    "e2el": "End-to-End Latency",
}
HEAD = (
    ("Successful requests:", "completed", "d"),
    ("Failed requests:", "failed", "d"),
    ("Benchmark duration (s):", "duration", ".2f"),
    ("Total input tokens:", "total_input_tokens", "d"),
    ("Total input text tokens:", "total_input_text_tokens", "d"),
    ("Total input vision tokens:", "total_input_vision_tokens", "d"),
    ("Total generated tokens:", "total_output_tokens", "d"),
    ("Total generated tokens (retokenized):", "total_output_tokens_retokenized", "d"),
    ("Request throughput (req/s):", "request_throughput", ".2f"),
    ("Request goodput (req/s):", "request_goodput", ".2f"),
    ("Image throughput (img/s):", "image_throughput", ".2f"),
    ("Input token throughput (tok/s):", "input_throughput", ".2f"),
    ("Vision token throughput (tok/s):", "vision_token_throughput", ".2f"),
    ("Output token throughput (tok/s):", "output_throughput", ".2f"),
    ("Peak output token throughput (tok/s):", "max_output_tokens_per_s", ".2f"),
    ("Peak concurrent requests:", "max_concurrent_requests", "d"),
    ("Total token throughput (tok/s):", "total_token_throughput", ".2f"),
    ("Concurrency:", "concurrency", ".2f"),
)


def print_run(run: ServingRun, console: Console) -> None:
    for line in block(run):
        console.print(line, markup=False, highlight=False)
    for table in (stage_table(run.stages), graph_table(run.graphs), clock_table(run.metrics, run.figures["duration"])):
        if table is not None:
            print_table(console, table)
    for line in memory_lines(run.gauges):
        console.print(line, markup=False, highlight=False)
    if run.caches.summary:
        console.print(run.caches.summary, markup=False, highlight=False)
    print_red(console, [*failure_lines(run), *run.warnings])


def print_red(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(line, style="bold red", markup=False, highlight=False, soft_wrap=True)


def block(run: ServingRun) -> list[str]:
    """The block of figures that readers and scripts know from the benchmarks of other engines."""
    figures, settings = run.figures, run.settings
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
    if run.name:
        lines.append(_line("Run:", run.name))
    lines.append(_line("Backend:", settings["target"]["backend"]))
    lines.append(_line("Traffic request rate:", settings["load"]["request_rate"]))
    lines.append(_line("Max request concurrency:", settings["load"]["max_concurrency"] or "not set"))
    lines.append(_line("Seed:", settings["workload"]["seed"]))
    lines += [_line(label, format(figures[key], form)) for label, key, form in HEAD if figures[key] is not None]
    output = OutputSettings(**settings["output"])
    for metric in output.metrics() if figures["completed"] else ():
        lines += _metric_lines(metric, figures, output.percentiles())
    return [*lines, "=" * WIDTH]


def stage_table(stages: Mapping[str, Mapping[str, float]]) -> Table | None:
    if not stages:
        return None
    table = Table("stage", "mean ms", "median ms", "p99 ms", "share", title="where the time of a request goes")
    for name, told in stages.items():
        numbers = (f"{told[key]:.2f}" for key in ("mean_ms", "median_ms", "p99_ms"))
        table.add_row(escape(name), *numbers, f"{told['share']:.1%}")
    return table


def graph_table(phases: Sequence[Mapping[str, Any]]) -> Table | None:
    if not phases:
        return None
    table = Table("phase", "replays", "not replayed", "why", "rows", "padding", "graphs", "MiB", title="graphs")
    for phase in phases:
        why = ", ".join(f"{reason} {count}" for reason, count in phase["fallbacks_by_reason"].items())
        counts = (str(phase["replays"]), str(phase["fallbacks"]), escape(why), str(phase["real_rows"]))
        size = f"{phase['graph_bytes'] / MIB:.0f}"
        table.add_row(escape(phase["phase"]), *counts, f"{phase['padding']:.1%}", str(phase["graphs"]), size)
    return table


def clock_table(metrics: Mapping[str, float], duration_s: float) -> Table | None:
    """How much the server's histograms and counters of seconds grew in this run. Clocks of the whole server can be
    compared with the duration of the run; clocks of requests add up times that overlap."""
    rows = []
    for name, seconds in metrics.items():
        family = name.partition("{")[0]
        is_twin = name.startswith("vllm:") and name.replace("vllm:", "saccade:", 1) in metrics
        if not family.endswith(("_seconds_sum", "_seconds_total")) or is_twin:
            continue
        count = metrics.get(name.replace("_sum", "_count", 1), 0.0) if family.endswith("_sum") else 0.0
        label = _short(CLOCK_END.sub("", name, count=1))
        each = (f"{count:.0f}", f"{seconds / count * 1e3:.3f}") if count else ("", "")
        rows.append((label, each[0], f"{seconds:.3f}", f"{seconds / duration_s:.1%}", each[1]))
    if not rows:
        return None
    table = Table("clock", "times", "seconds", "of the run", "mean ms", title="the server's own clocks in this run")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def memory_lines(gauges: Mapping[str, float]) -> list[str]:
    named = {name: value for name, value in gauges.items() if "memory" in name and "bytes" in name and value}
    return [f"{_short(name)}: {value / MIB:.0f} MiB" for name, value in named.items()]


def _short(name: str) -> str:
    """Drops the prefix of a metric, and labels that all metrics of the server share."""
    family, labels = family_and_labels(name)
    own = [f"{label}={value}" for label, value in labels.items() if label not in SAME_FOR_ALL]
    return " ".join([family.rpartition(":")[2], *own])


def failure_lines(run: ServingRun) -> list[str]:
    """Lists each kind of failure, with its count and its first message."""
    first = {outcome.error: outcome for outcome in reversed(run.outcomes) if outcome.error}
    return [
        f"failed: {count} x {kind}, first request {first[kind].index}: {first[kind].message}"
        for kind, count in run.figures["errors_by_kind"].items()
    ]


def _metric_lines(metric: str, figures: Mapping[str, Any], points: Sequence[float]) -> list[str]:
    lines = [f"{TITLES[metric]:-^{WIDTH}}"]
    short = "E2E Latency" if metric == "e2el" else metric.upper()
    shown = sorted({*map(float, points), *USUAL_PERCENTILES[metric]})
    for name in ("mean", "median", *map(percentile_name, shown), *(["max"] if metric == "itl" else [])):
        value = figures[f"{name}_{metric}_ms"]
        lines.append(_line(f"{name[0].upper()}{name[1:]} {short} (ms):", "n/a" if value is None else f"{value:.2f}"))
    return lines


def _line(label: str, value: object) -> str:
    return f"{label:<40} {value!s:<10}"

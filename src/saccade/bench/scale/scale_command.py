"""`saccade bench scale`: simulates, prints and saves the figures, and returns the exit code."""

import importlib
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from saccade.bench.scale.scale_settings import ScaleSettings
from saccade.bench.scale.simulation import ScaleBench, ScaleLine, run_scale_bench
from saccade.terminal import check_file, check_plot, print_table, shown_progress, write_json

EXIT_FAILED_REQUESTS = 1
PANELS = (
    ("encoder_hit_rate", "encoder cache hits", "linear"),
    ("prefix_hit_rate", "prefix cache hits", "linear"),
    ("ttft_p99_ms", "p99 time to first token, ms", "log"),
    ("throughput_per_replica", "requests/s and replica", "linear"),
)


def bench_scale(settings: ScaleSettings, console: Console) -> int:
    check_file(settings.json)
    check_plot(settings.plot)
    with shown_progress(Console(stderr=True)) as hear:
        bench = run_scale_bench(settings, hear)
    print_scale(bench, console)
    if settings.json:
        write_json(settings.json, asdict(bench))
    if settings.plot:
        plot_scale(bench, settings.plot)
    return EXIT_FAILED_REQUESTS if any(line.failed for line in bench.lines) else 0


def print_scale(bench: ScaleBench, console: Console) -> None:
    table = Table(
        *("replicas", "policy", "encoder hits", "prefix hits", "TTFT p50 / p99 ms"),
        *("requests/s", "per replica", "busiest", "refused"),
    )
    for line in bench.lines:
        table.add_row(*_cells(line))
    print_table(console, table)
    rate = bench.settings["request_rate"]
    console.print(f"simulated: {rate:g} requests/s arrive for each replica; pass times are measured ones of an H200")


def plot_scale(bench: ScaleBench, path: str) -> None:
    """Draws one panel for each figure, by number of replicas, with one line for each policy."""
    matplotlib: Any = importlib.import_module("matplotlib")
    figures: Any = importlib.import_module("matplotlib.figure")
    matplotlib.rcParams["svg.hashsalt"] = "saccade"  # equal figures give equal files
    figure = figures.Figure(figsize=(11, 3.2))
    for panel, (name, title, scale) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        for policy in dict.fromkeys(line.policy for line in bench.lines):
            mine = [line for line in bench.lines if line.policy == policy and getattr(line, name) is not None]
            counts = [line.replicas for line in mine]
            panel.plot(counts, [getattr(line, name) for line in mine], marker="o", markersize=3, label=policy)
        panel.set(title=title, xlabel="replicas", xscale="log", yscale=scale)
        panel.title.set_fontsize(9)
        panel.set_xticks(bench.settings["replicas"], [str(count) for count in bench.settings["replicas"]])
        panel.minorticks_off()
        if scale == "linear":
            panel.set_ylim(bottom=0)
    lines, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="lower center", ncols=len(names), fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    kind = {"Date": None} if path.lower().endswith(".svg") else {"Software": None}
    figure.savefig(path, dpi=100, metadata=kind)


def _cells(line: ScaleLine) -> Iterator[str]:
    p50, p99 = ("-" if wait is None else f"{wait:.0f}" for wait in (line.ttft_p50_ms, line.ttft_p99_ms))
    yield from (str(line.replicas), line.policy, f"{line.encoder_hit_rate:.0%}", f"{line.prefix_hit_rate:.0%}")
    yield from (f"{p50} / {p99}", f"{line.throughput:,.0f}", f"{line.throughput_per_replica:.1f}")
    yield from (f"{line.busiest:.2f}", str(line.refused))

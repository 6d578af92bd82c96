"""`saccade bench offline`, `vision`, `graphs` and `allreduce`: measures, prints, saves, and returns the exit code."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console

from saccade import bundled
from saccade.bench.passes.allreduce import print_allreduce_bench, run_allreduce_bench
from saccade.bench.passes.graph_bench import print_graph_bench, run_graph_bench
from saccade.bench.passes.offline_bench import run_offline_bench
from saccade.bench.passes.offline_report import print_offline_bench
from saccade.bench.passes.pass_settings import (
    AllReduceBenchSettings,
    GraphBenchSettings,
    OfflineBenchSettings,
    VisionBenchSettings,
)
from saccade.bench.passes.vision_bench import run_vision_bench
from saccade.bench.passes.vision_report import plot_vision_bench, print_vision_bench
from saccade.terminal import check_file, check_plot, stages, write_json

EXIT_WRONG = 1


def bench_offline(model: str, settings: OfflineBenchSettings, console: Console) -> int:
    _finish(partial(run_offline_bench, model or str(bundled.path())), settings, print_offline_bench, console)
    return 0


def bench_vision(model: str, settings: VisionBenchSettings, console: Console) -> int:
    check_plot(settings.plot)
    bench = _finish(partial(run_vision_bench, model or str(bundled.path())), settings, print_vision_bench, console)
    if settings.plot:
        plot_vision_bench(bench, settings.plot)
    return 0


def bench_graphs(settings: GraphBenchSettings, console: Console) -> int:
    bench = _finish(run_graph_bench, settings, print_graph_bench, console)
    return 0 if all(line.equals_eager for line in bench.lines) else EXIT_WRONG


def bench_allreduce(settings: AllReduceBenchSettings, console: Console) -> int:
    bench = _finish(run_allreduce_bench, settings, print_allreduce_bench, console)
    return 0 if all(line.is_right for line in bench.lines) else EXIT_WRONG


def _finish(measure: Callable[..., Any], settings: Any, show: Callable[[Any, Console], None], console: Console) -> Any:
    check_file(settings.json)
    with stages(Console(stderr=True), "starting") as say:
        bench = measure(settings, say)
    if settings.json:
        write_json(settings.json, asdict(bench))
    show(bench, console)
    console.print(" ".join(f"{key}={value}" for key, value in bench.environment.items()))
    return bench

"""The whole of `saccade bench serve` and `saccade bench startup`: run, print, save, compare; the exit code."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from saccade.bench.html import page
from saccade.bench.serving import Plan, ServingRun, run_serving, run_variants
from saccade.bench.serving_files import as_data, load, save
from saccade.bench.serving_report import RichShown, print_comparison, print_run
from saccade.bench.serving_settings import (
    LoadSettings,
    OutputSettings,
    StartupBenchSettings,
    TargetSettings,
    VariantSettings,
    WorkloadSettings,
)
from saccade.bench.startup import print_startup, run_startup_bench, save_startup
from saccade.errors import ConfigError

EXIT_FAILED_REQUESTS = 1


def bench_serve(
    target: TargetSettings,
    workload: WorkloadSettings,
    load_settings: LoadSettings,
    output: OutputSettings,
    variants: VariantSettings,
    console: Console,
) -> int:
    """0 only when every request of every run was answered."""
    earlier = load(output.compare) if output.compare else None  # a wrong name is told before anything runs
    shown = RichShown(Console(stderr=True))
    plan = Plan(workload, load_settings, output)
    runs = run_variants(target, plan, variants, shown) if variants.is_used else [run_serving(target, plan, shown)]
    for run in runs:
        print_run(run, console)
    _compare(runs, earlier, console)
    _keep(runs, output, earlier, console)
    return EXIT_FAILED_REQUESTS if any(run.failed for run in runs) else 0


def bench_startup(model: str, settings: StartupBenchSettings, console: Console) -> int:
    starts = run_startup_bench(model, settings, RichShown(Console(stderr=True)))
    print_startup(starts, console)
    if settings.json:
        save_startup(starts, settings.json)
    return EXIT_FAILED_REQUESTS if any(start.failures for start in starts) else 0


def _compare(runs: Sequence[ServingRun], earlier: dict[str, object] | None, console: Console) -> None:
    named = [(run.name or f"run {index + 1}", as_data(run)) for index, run in enumerate(runs)]
    if earlier is not None:
        named = [(str(earlier.get("label") or "earlier"), earlier), *named]
    if len(named) > 1:
        print_comparison([name for name, _ in named], [data for _, data in named], console)


def _keep(
    runs: Sequence[ServingRun], output: OutputSettings, earlier: dict[str, object] | None, console: Console
) -> None:
    if output.save_result or output.save_detailed or output.result_filename:
        for run in runs:
            console.print(f"saved {save(run, output, is_one_of_many=len(runs) > 1)}", markup=False, highlight=False)
    if output.report:
        try:
            Path(output.report).write_text(page(runs, earlier), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{output.report} cannot be written: {error.strerror} (--report)") from None
        console.print(f"wrote {output.report}", markup=False, highlight=False)

"""`saccade bench serve` and `saccade bench startup`: runs, prints, saves and compares, and returns the exit code."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from saccade.bench.serving.html import page
from saccade.bench.serving.serving_against import Comparison, run_against
from saccade.bench.serving.serving_against_report import print_comparison, ratio_table, save_comparison, verdict_lines
from saccade.bench.serving.serving_against_settings import AgainstSettings
from saccade.bench.serving.serving_differences import differences
from saccade.bench.serving.serving_loads import loads_path, loads_table, new_results, run_loads, save_loads, unfinished
from saccade.bench.serving.serving_loads_settings import LoadsSettings
from saccade.bench.serving.serving_report import print_red, print_run
from saccade.bench.serving.serving_results import as_data, comparison_table, load, save
from saccade.bench.serving.serving_run import ServingRun, Shown, run_serving, started
from saccade.bench.serving.serving_settings import OutputSettings, ServingPlan, StartupBenchSettings, VariantSettings
from saccade.bench.serving.serving_stats import main_figures
from saccade.bench.serving.startup import print_startup, run_startup_bench
from saccade.errors import ConfigError, SaccadeError
from saccade.terminal import check_file, print_table, write_file, write_json

EXIT_FAILED_REQUESTS = 1


def bench_serve(
    plan: ServingPlan,
    variants: VariantSettings,
    console: Console,
    against: AgainstSettings | None = None,
    loads: LoadsSettings | None = None,
) -> int:
    """Returns 0 only if every request of every run was answered."""
    if loads is not None and loads.loads:
        return _bench_loads(plan, variants, against or AgainstSettings(), loads, console)
    if against is not None and against.against:
        return _bench_against(plan, variants, against, console)
    output = plan.output
    earlier = load(output.compare) if output.compare else None  # a wrong name fails before anything runs
    shown = Shown(Console(stderr=True))
    runs: list[ServingRun] = []
    try:
        if variants.is_used:
            for name in variants.flags_by_name():
                with started(variants, name, shown) as measure:
                    runs.append(measure(plan))
                    shown.tell(f"{runs[-1].name or 'finished'}: {main_figures(runs[-1].figures)}")
        else:
            runs.append(run_serving(plan, shown))
    finally:  # Ctrl-C, SIGTERM and errors, too, show what is finished
        left = list(variants.flags_by_name())[len(runs) :] if variants.is_used else []
        if runs:
            _show_runs(runs, left, earlier, output, console)
        elif left:
            _print_nothing("variant", console)
    return EXIT_FAILED_REQUESTS if any(run.failed for run in runs) else 0


def _show_runs(
    runs: Sequence[ServingRun],
    left: Sequence[str],
    earlier: Mapping[str, Any] | None,
    output: OutputSettings,
    console: Console,
) -> None:
    """`left` names the variants that were not measured."""
    for run in runs:
        print_run(run, console)
    named: list[tuple[str, Mapping[str, Any]]] = []
    if earlier is not None:
        named.append((str(earlier.get("label") or "earlier"), earlier))
    named += [(run.name or f"run {index + 1}", as_data(run)) for index, run in enumerate(runs)]
    if len(named) > 1:
        print_table(console, comparison_table(named))
    unequal = [line for _, data in named[1:] for line in differences(earlier, data)] if earlier is not None else []
    warnings = [*dict.fromkeys(unequal), *_incomplete(left)]
    print_red(console, warnings)
    if output.is_saving:
        is_one_of_many = len(runs) + len(left) > 1
        for run in runs:
            console.print(f"saved {save(run, output, is_one_of_many=is_one_of_many)}", markup=False, highlight=False)
    if output.report:
        _write_page(page(runs, named, warnings), output, console)


def _print_nothing(what: str, console: Console) -> None:
    if not isinstance(sys.exception(), SaccadeError):  # that says itself why nothing was finished
        print_red(console, [f"INCOMPLETE: no {what} was finished"])


def _incomplete(left: Sequence[str]) -> list[str]:
    return [f"INCOMPLETE, not finished: {'; '.join(left)}"] if left else []


def _bench_against(plan: ServingPlan, variants: VariantSettings, against: AgainstSettings, console: Console) -> int:
    output = plan.output
    _check_against(variants)
    if output.compare:
        raise ConfigError("--against compares servers with each other; leave out --compare")
    kept: list[Comparison] = []
    try:
        run_against(plan, against, Shown(Console(stderr=True)), kept.append)
    finally:  # Ctrl-C, SIGTERM and errors, too, show what is finished
        for comparison in kept:
            _show_comparison(comparison, output, console)
        if not kept:
            _print_nothing("round", console)
    return EXIT_FAILED_REQUESTS if any(run.failed for run in kept[0].runs) else 0


def _show_comparison(comparison: Comparison, output: OutputSettings, console: Console) -> None:
    print_comparison(comparison, console)
    if output.is_saving:
        console.print(f"saved {save_comparison(comparison, output)}", markup=False, highlight=False)
    if output.report:
        named = [(run.name, as_data(run)) for run in comparison.runs]
        table = ratio_table(comparison)
        lines = verdict_lines(comparison)
        _write_page(page(comparison.runs, named, comparison.warnings, (table, lines)), output, console)


def _check_against(variants: VariantSettings) -> None:
    if variants.is_used:
        raise ConfigError(
            "--against compares servers that are already running; leave out --serve-model, --serve-args and --variants"
        )


def _bench_loads(
    plan: ServingPlan, variants: VariantSettings, against: AgainstSettings, loads: LoadsSettings, console: Console
) -> int:
    output = plan.output
    if against.against:
        _check_against(variants)
    if output.compare or output.report:
        raise ConfigError(
            "--loads prints one table for all loads; leave out --compare and --report, or run a single load"
        )
    results, path = new_results(loads.plans(plan), variants), loads_path(output)

    def keep() -> None:
        if output.is_saving:
            save_loads(results, output, path)

    try:
        run_loads(results, variants, against, Shown(Console(stderr=True)), keep)
    finally:  # Ctrl-C, SIGTERM and errors, too, show what is finished
        if any(result.runs for result in results):
            print_table(console, loads_table(results))
            print_red(console, [line for result in results for line in result.warnings])
            print_red(console, _incomplete(unfinished(results)))
            keep()
            if output.is_saving:
                console.print(f"saved {path}", markup=False, highlight=False)
        else:
            _print_nothing("load", console)
    return EXIT_FAILED_REQUESTS if any(run.failed for result in results for run in result.runs) else 0


def _write_page(text: str, output: OutputSettings, console: Console) -> None:
    write_file(output.report, text, "--report")
    console.print(f"wrote {output.report}", markup=False, highlight=False)


def bench_startup(model: str, settings: StartupBenchSettings, console: Console) -> int:
    check_file(settings.json)
    starts = run_startup_bench(model, settings, Shown(Console(stderr=True)))
    print_startup(starts, console)
    if settings.json:
        write_json(settings.json, {"starts": [asdict(start) for start in starts]})
    return EXIT_FAILED_REQUESTS if any(start.failures for start in starts) else 0

"""`saccade bench serve` and `saccade bench startup`: runs, prints, saves and compares, and returns the exit code."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from saccade.bench.serving.html import page
from saccade.bench.serving.serving_comparison import comparison_data, ratio_table, verdict_lines
from saccade.bench.serving.serving_differences import differences
from saccade.bench.serving.serving_loads import LoadResult, loads_data, loads_table, new_results, run_loads, unfinished
from saccade.bench.serving.serving_report import print_red, print_run
from saccade.bench.serving.serving_results import as_data, comparison_table, load, result_path, save, write_result
from saccade.bench.serving.serving_run import Shown
from saccade.bench.serving.serving_settings import (
    AgainstSettings,
    OutputSettings,
    ServingPlan,
    StartupBenchSettings,
    VariantSettings,
)
from saccade.bench.serving.startup import print_startup, run_startup_bench
from saccade.errors import ConfigError, SaccadeError
from saccade.terminal import check_file, print_table, write_file, write_json

EXIT_FAILED_REQUESTS = 1
NO_VARIANTS, NO_OTHERS = VariantSettings(), AgainstSettings()


def bench_serve(
    plans: Mapping[str, ServingPlan],
    console: Console,
    variants: VariantSettings = NO_VARIANTS,
    against: AgainstSettings = NO_OTHERS,
) -> int:
    """Returns 0 only if every request of every run was answered. `plans` are the loads by name, which share a table. A
    single one without a name has a report of its own."""
    output = next(iter(plans.values())).output
    is_table = "" not in plans
    _check_combination(output, variants, against, is_table=is_table)
    check_file(output.report, "--report")  # wrong names fail before anything runs
    earlier = load(output.compare) if output.compare else None
    results = new_results(plans, variants)
    path = result_path(output, ["loads"], datetime.now(UTC).isoformat())

    def keep() -> None:
        if is_table and output.is_saving:
            write_result(path, loads_data(results, is_detailed=output.save_detailed))

    try:
        run_loads(results, variants, against, Shown(Console(stderr=True)), keep)
    finally:  # Ctrl-C, SIGTERM and errors, too, show what is finished
        if not any(result.runs for result in results):
            if not isinstance(sys.exception(), SaccadeError):  # that says itself why nothing was finished
                print_red(console, ["INCOMPLETE: nothing was finished"])
        elif is_table:
            print_table(console, loads_table(results))
            print_red(
                console, [line for result in results for line in result.warnings] + _incomplete(unfinished(results))
            )
            keep()
            if output.is_saving:
                _say(console, f"saved {path}")
        else:
            _show(results[0], earlier, output, console)
    return EXIT_FAILED_REQUESTS if any(run.failed for result in results for run in result.runs) else 0


def _check_combination(
    output: OutputSettings, variants: VariantSettings, against: AgainstSettings, *, is_table: bool
) -> None:
    if against.against and variants.is_used:
        raise ConfigError(
            "--against compares servers that are already running; leave out --serve-model, --serve-args and --variants"
        )
    if is_table and (output.compare or output.report):
        raise ConfigError(
            "--loads prints one table for all loads; leave out --compare and --report, or run a single load"
        )
    if against.against and output.compare:
        raise ConfigError("--against compares servers with each other; leave out --compare")


def _show(result: LoadResult, earlier: Mapping[str, Any] | None, output: OutputSettings, console: Console) -> None:
    """Shows and saves the only load: all figures of each server, then a comparison with the first."""
    runs, comparison = result.runs, result.comparison
    for run in runs:
        print_run(run, console)
    named = [(run.name or f"run {number}", as_data(run)) for number, run in enumerate(runs, start=1)]
    table, verdicts = None, list[str]()
    if comparison is not None:
        table = ratio_table(comparison) if comparison.ratios else None
        verdicts, warnings = verdict_lines(comparison), comparison.warnings
    else:
        unequal = [line for _, data in named for line in differences(earlier, data)] if earlier is not None else []
        warnings = [*dict.fromkeys(unequal), *_incomplete(result.left)]
        if earlier is not None:
            named.insert(0, (str(earlier.get("label") or "earlier"), dict(earlier)))
        table = comparison_table(named) if len(named) > 1 else None
    if table is not None:
        print_table(console, table)
    for line in verdicts:
        _say(console, line)
    print_red(console, warnings)
    if output.is_saving:
        for path in _save(result, output):
            _say(console, f"saved {path}")
    if output.report:
        write_file(output.report, page(runs, named, table, verdicts, warnings), "--report")
        _say(console, f"wrote {output.report}")


def _save(result: LoadResult, output: OutputSettings) -> list[Path]:
    runs = result.runs
    if result.comparison is None:
        return [save(run, output, is_one_of_many=len(runs) + len(result.left) > 1) for run in runs]
    path = result_path(output, ["-against-".join(run.name for run in runs)], runs[0].environment["date"])
    write_result(path, comparison_data(result.comparison, is_detailed=output.save_detailed))
    return [path]


def _incomplete(left: Sequence[str]) -> list[str]:
    return [f"INCOMPLETE, not finished: {'; '.join(left)}"] if left else []


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def bench_startup(model: str, settings: StartupBenchSettings, console: Console) -> int:
    check_file(settings.json)
    starts = run_startup_bench(model, settings, Shown(Console(stderr=True)))
    print_startup(starts, console)
    if settings.json:
        write_json(settings.json, {"starts": [asdict(start) for start in starts]})
    return EXIT_FAILED_REQUESTS if any(start.failures for start in starts) else 0

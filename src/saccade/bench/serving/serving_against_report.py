"""What `saccade bench serve --against` prints and saves: figures, ratios with intervals, and who is ahead."""

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from saccade.bench.serving.serving_against import Comparison
from saccade.bench.serving.serving_interval import Ratio
from saccade.bench.serving.serving_report import print_red, print_run
from saccade.bench.serving.serving_results import COLOURS, RESULT_FLAGS, as_data, safe_name
from saccade.bench.serving.serving_settings import OutputSettings
from saccade.terminal import print_table, write_json

INCLUDES_ONE = "includes 1"


def print_comparison(comparison: Comparison, console: Console) -> None:
    for run in comparison.runs:
        print_run(run, console)
    if comparison.ratios:
        print_table(console, ratio_table(comparison))
    for line in verdict_lines(comparison):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    print_red(console, comparison.warnings)


def ratio_table(comparison: Comparison) -> Table:
    """One row per figure. If a ratio is above 1, the first server is ahead, whatever the figure."""
    first = escape(comparison.first)
    names = [escape(run.name) for run in comparison.runs]
    heads = [f"{first} : {name}" for name in names[1:]] if len(names) > 2 else ["ratio"]
    columns = [part for head in heads for part in (head, "95% interval", "ahead")]
    rounds = len(comparison.orders)
    said = f"{rounds} rounds in turn; a ratio above 1: {first} is ahead" if comparison.ratios else "no ratios"
    table = Table("", *names, *columns, title=said)
    by_key = {name: {ratio.key: ratio for ratio in found} for name, found in comparison.ratios.items()}
    keys = dict.fromkeys(key for found in by_key.values() for key in found)
    for key in keys:
        known = [found[key] for found in by_key.values() if key in found]
        cells = [f"{known[0].first:.2f}", *(_figure(found.get(key)) for found in by_key.values())]
        for name, found in by_key.items():
            cells += _ratio_cells(comparison.first, name, found.get(key))
        table.add_row(known[0].label, *cells)
    return table


def verdict_lines(comparison: Comparison) -> list[str]:
    """Says which server is ahead in which figures, and where the data show no difference."""
    lines = []
    for name, found in comparison.ratios.items():
        groups = {
            f"{comparison.first} is ahead of {name} in": [each for each in found if each.verdict == "better"],
            f"{name} is ahead of {comparison.first} in": [each for each in found if each.verdict == "worse"],
            f"no difference shown between {comparison.first} and {name} (the interval {INCLUDES_ONE}) in": [
                each for each in found if each.includes_one
            ],
        }
        lines += [
            f"{said}: {', '.join(f'{each.label} ({each.ratio:.2f}x)' for each in group)}"
            for said, group in groups.items()
            if group
        ]
    return lines


def comparison_data(comparison: Comparison, *, is_detailed: bool = False) -> dict[str, Any]:
    first = comparison.runs[0]
    return {
        "date": first.environment["date"],
        "first": comparison.first,
        "seed": first.settings["workload"]["seed"],
        "rounds": len(comparison.orders),
        "is_complete": comparison.is_complete,
        "orders": comparison.orders,
        "ratios": {name: [_ratio_data(each) for each in found] for name, found in comparison.ratios.items()},
        "verdicts": verdict_lines(comparison),
        "warnings": comparison.warnings,
        "targets": [as_data(run, is_detailed=is_detailed) for run in comparison.runs],
    }


def save_comparison(comparison: Comparison, output: OutputSettings) -> Path:
    path = Path(output.result_dir) / (output.result_filename or _file_name(comparison))
    data = comparison_data(comparison, is_detailed=output.save_detailed)
    write_json(path, data, RESULT_FLAGS, makes_folder=True)
    return path


def _file_name(comparison: Comparison) -> str:
    moment = datetime.fromisoformat(comparison.runs[0].environment["date"]).strftime("%Y%m%d-%H%M%S")
    return "-against-".join(safe_name(run.name) for run in comparison.runs) + f"-{moment}.json"


def _ratio_data(ratio: Ratio) -> Mapping[str, Any]:
    return asdict(ratio) | {"includes_one": ratio.includes_one}


def _figure(ratio: Ratio | None) -> str:
    return "" if ratio is None else f"{ratio.other:.2f}"


def _ratio_cells(first: str, name: str, ratio: Ratio | None) -> list[str]:
    if ratio is None:
        return ["", "", ""]
    colour = COLOURS[ratio.verdict]
    ahead = INCLUDES_ONE if ratio.includes_one else escape(first if ratio.ratio > 1 else name)
    return [f"[{colour}]{ratio.ratio:.3f}[/]", f"{ratio.low:.3f} to {ratio.high:.3f}", f"[{colour}]{ahead}[/]"]

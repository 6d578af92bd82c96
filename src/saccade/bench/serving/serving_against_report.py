"""What `saccade bench serve --against` prints and saves of ratios: a table with intervals, and who is ahead."""

from dataclasses import asdict
from typing import Any

from rich.markup import escape
from rich.table import Table

from saccade.bench.serving.serving_interval import Ratio
from saccade.bench.serving.serving_results import COLOURS, as_data
from saccade.bench.serving.serving_turns import Comparison

INCLUDES_ONE = "includes 1"


def ratio_table(comparison: Comparison) -> Table:
    """One row per figure. If a ratio is above 1, the first server is ahead, whatever the figure."""
    first = escape(comparison.first)
    names = [escape(run.name) for run in comparison.runs]
    heads = [f"{first} : {name}" for name in names[1:]] if len(names) > 2 else ["ratio"]
    columns = [part for head in heads for part in (head, "95% interval", "ahead")]
    rounds = len(comparison.orders)
    table = Table("", *names, *columns, title=f"{rounds} rounds in turn; a ratio above 1: {first} is ahead")
    for key in dict.fromkeys(key for found in comparison.ratios.values() for key in found):
        each = {name: found.get(key) for name, found in comparison.ratios.items()}
        known = [ratio for ratio in each.values() if ratio is not None]
        cells = [f"{known[0].first:.2f}", *("" if ratio is None else f"{ratio.other:.2f}" for ratio in each.values())]
        for name, ratio in each.items():
            cells += _ratio_cells(comparison.first, name, ratio)
        table.add_row(known[0].label, *cells)
    return table


def verdict_lines(comparison: Comparison) -> list[str]:
    """Says which server is ahead in which figures, and where the data show no difference."""
    first, lines = comparison.first, []
    for name, found in comparison.ratios.items():
        groups = {
            "better": f"{first} is ahead of {name}",
            "worse": f"{name} is ahead of {first}",
            "": f"no difference shown between {first} and {name} (the interval {INCLUDES_ONE})",
        }
        for verdict, said in groups.items():
            if group := [f"{ratio.label} ({ratio.ratio:.2f}x)" for ratio in found.values() if ratio.verdict == verdict]:
                lines.append(f"{said} in: {', '.join(group)}")
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
        "ratios": {
            name: [asdict(ratio) | {"includes_one": ratio.includes_one} for ratio in found.values()]
            for name, found in comparison.ratios.items()
        },
        "verdicts": verdict_lines(comparison),
        "warnings": comparison.warnings,
        "targets": [as_data(run, is_detailed=is_detailed) for run in comparison.runs],
    }


def _ratio_cells(first: str, name: str, ratio: Ratio | None) -> list[str]:
    if ratio is None:
        return ["", "", ""]
    colour = COLOURS[ratio.verdict]
    ahead = INCLUDES_ONE if ratio.includes_one else escape(first if ratio.ratio > 1 else name)
    return [f"[{colour}]{ratio.ratio:.3f}[/]", f"{ratio.low:.3f} to {ratio.high:.3f}", f"[{colour}]{ahead}[/]"]

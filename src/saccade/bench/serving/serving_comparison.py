"""Compares servers that took turns with the same requests: ratios of their figures with confidence intervals.

Every round gives one ratio, in which whatever slows down both servers cancels out. Requests of a round queue behind
each other, but rounds are independent, so the interval is Student's, over the logarithms of the rounds' ratios.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import exp, log, sqrt
from statistics import mean, stdev
from typing import Any

from rich.markup import escape
from rich.table import Table

from saccade.bench.serving.serving_results import COLOURS, as_data
from saccade.bench.serving.serving_run import ServingRun
from saccade.bench.serving.serving_stats import RATES_AND_TIMES, Figures

NORMAL = 1.96
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # 97.5% for 1, 2, ... degrees of freedom
INCLUDES_ONE = "includes 1"


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times better the first server is than the other. Above 1 it is ahead, whatever the figure. `first` and
    `other` are the figures over all rounds."""

    label: str
    key: str
    first: float
    other: float
    ratio: float
    low: float
    high: float

    @property
    def includes_one(self) -> bool:
        return self.low <= 1 <= self.high

    @property
    def verdict(self) -> str:
        if self.includes_one:
            return ""
        return "better" if self.ratio > 1 else "worse"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The first run is that of --base-url. `orders` lists the servers of each round in the order of their turns.
    `ratios` compares the first server with each other one, by name and figure; a single round gives none. `cautions`
    say why they may mislead."""

    runs: list[ServingRun]
    orders: list[list[str]]
    ratios: dict[str, dict[str, Ratio]]
    cautions: list[str]
    num_rounds: int

    @property
    def first(self) -> str:
        return self.runs[0].name

    @property
    def is_complete(self) -> bool:
        return len(self.orders) == self.num_rounds

    @property
    def warnings(self) -> list[str]:
        if self.is_complete:
            return self.cautions
        end = "" if self.ratios else ", without ratios"
        return [*self.cautions, f"INCOMPLETE: {len(self.orders)} of {self.num_rounds} rounds{end}"]


def ratios(first: Figures, other: Figures, rounds: Sequence[tuple[Figures, Figures]]) -> dict[str, Ratio]:
    """Compares every figure that both servers have in all rounds, by key. `rounds` has the figures of both."""
    found = {}
    for label, key, direction in RATES_AND_TIMES:
        pairs = [(one[key], two[key]) for one, two in rounds]
        if all(one and two for one, two in pairs):
            logs = [direction * log(one / two) for one, two in pairs]
            found[key] = Ratio(label, key, first[key], other[key], *with_interval(logs))
    return found


def with_interval(logs: Sequence[float]) -> tuple[float, float, float]:
    """The geometric mean of ratios, given their logarithms, and the ends of its 95% interval."""
    degrees = len(logs) - 1
    quantile = T_QUANTILES[degrees - 1] if degrees <= len(T_QUANTILES) else NORMAL + 2.5 / degrees
    middle, half = mean(logs), quantile * stdev(logs) / sqrt(len(logs))
    return exp(middle), exp(middle - half), exp(middle + half)


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

"""Runs side by side: which figures, and by what factor they differ from the first run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

HIGHER, LOWER = 1, -1
COMPARED = (
    ("requests/s", "request_throughput", HIGHER),
    ("good requests/s", "request_goodput", HIGHER),
    ("vision tokens/s", "vision_token_throughput", HIGHER),
    ("input tokens/s", "input_throughput", HIGHER),
    ("output tokens/s", "output_throughput", HIGHER),
    *(
        (f"{word} {metric.upper()} ms", f"{word}_{metric}_ms", LOWER)
        for metric in ("ttft", "tpot", "itl", "e2el")
        for word in ("mean", "median", "p99")
    ),
    ("failed", "failed", LOWER),
    ("duration s", "duration", LOWER),
)
SAME = 0.02  # a smaller change is noise


COLOURS = {"better": "green", "worse": "red", "": "default"}
Named = Sequence[tuple[str, Mapping[str, Any]]]
"""The data of runs, each with its name."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of all runs, and each run's factor to the first: above 1 is better, whatever the figure is."""

    label: str
    values: tuple[float | None, ...]
    gains: tuple[float | None, ...]

    def verdict(self, index: int) -> str:
        gain = self.gains[index]
        if index == 0 or gain is None or abs(gain - 1) < SAME:
            return ""
        return "better" if gain > 1 else "worse"


def comparison_table(named: Named) -> Table:
    """Figures of all runs, with each run's gain over the first."""
    first, *others = (escape(name) for name, _ in named)
    headers = ("", first, *(part for name in others for part in (name, "gain")))
    table = Table(*headers, title=f"compared with {first}: a gain above 1 is better")
    for row in compare([data for _, data in named]):
        cells = [_shown(row.values[0])]
        for index in range(1, len(row.values)):
            gain = row.gains[index]
            cells.append(_shown(row.values[index]))
            cells.append("" if gain is None else f"[{COLOURS[row.verdict(index)]}]{gain:.2f}x[/]")
        table.add_row(row.label, *cells)
    return table


def compare(runs: Sequence[Mapping[str, Any]]) -> list[Compared]:
    """Every figure that at least one run has."""
    rows = []
    for label, key, direction in COMPARED:
        values = tuple(_number(run.get(key)) for run in runs)
        if any(values):
            rows.append(Compared(label, values, tuple(_gain(values[0], value, direction) for value in values)))
    return rows


def _gain(base: float | None, value: float | None, direction: int) -> float | None:
    if not base or not value:
        return None
    return value / base if direction == HIGHER else base / value


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"

"""Runs side by side: which figures, and by what factor they differ from the first run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
SAME = 0.02  # of a change nobody should speak


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

"""Ratios of two servers with confidence intervals, from rounds in which both got the same requests.

Every round gives one ratio, in which whatever slows down both servers cancels out. Requests of a round queue behind
each other, but rounds are independent, so the interval is Student's, over the logarithms of the rounds' ratios.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import mean, stdev

from saccade.bench.serving.serving_stats import RATES_AND_TIMES, Figures

NORMAL = 1.96
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # 97.5% for 1, 2, ... degrees of freedom


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

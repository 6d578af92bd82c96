"""Ratios of two servers with confidence intervals, by bootstrap over rounds and over the requests of each round.

Both servers got the same requests in every round, so a resample takes the same rounds and requests from both, and what
makes a request slow on every server cancels out. Requests of one round are not independent, because they queue behind
each other, so whole rounds are resampled too. As rounds are few, their interval is the standard error times Student's
t. The wider interval counts at each end, because a few rounds may agree by accident.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, isfinite, log, sqrt

import numpy as np

from saccade.bench.load.client_reply import Outcome
from saccade.bench.serving.serving_stats import values_ms

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
NUM_RESAMPLES, MIN_RESAMPLES = 2000, 200
MAX_WORK = 2e8  # values times resamples; takes seconds
MAX_VALUES = 1_000_000  # of one metric; of more (gaps between tokens), every n-th is used
LOW, HIGH, NORMAL = 2.5, 97.5, 1.96
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # 97.5% for 1, 2, ... degrees of freedom


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times better the first server is than the other. Above 1 it is ahead, whatever the figure."""

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
class Round:
    """One round of one server. A rate is its entry in `totals` divided by `duration_s`."""

    outcomes: Sequence[Outcome]
    duration_s: float
    totals: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Statistic:
    """A rate, or a latency's mean (`point` is None) or percentile. `direction` is 1 if more is better, or -1."""

    label: str
    key: str
    direction: int
    metric: str = ""
    point: float | None = None


def student_factor(num_rounds: int) -> float:
    """Half the width of the interval, in standard errors of a bootstrap over rounds. n rounds have n - 1 degrees of
    freedom, and the bootstrap underestimates the variance by (n - 1) / n."""
    degrees = num_rounds - 1
    quantile = T_QUANTILES[degrees - 1] if degrees <= len(T_QUANTILES) else NORMAL + 2.5 / degrees
    return quantile * sqrt(num_rounds / degrees)


class Latencies:
    """All values of one metric of one server, sorted, each with the request it belongs to."""

    def __init__(self, values: Sequence[float], requests: Sequence[int]) -> None:
        step = max(1, -(-len(values) // MAX_VALUES))
        found = np.asarray(values[::step], dtype=np.float64)
        order = np.argsort(found, kind="stable")
        self.values = found[order]
        self.requests = np.asarray(requests[::step], dtype=np.int64)[order]

    def statistics(self, weights: Array, points: Sequence[float | None]) -> list[float]:
        """Computes the mean or percentiles, with a weight for each request."""
        own = weights[self.requests]
        passed = np.cumsum(own)
        if not len(own) or not passed[-1]:
            return [float("nan")] * len(points)
        return [self._one(own, passed, point) for point in points]

    def _one(self, own: Array, passed: Array, point: float | None) -> float:
        if point is None:
            return float(own @ self.values / passed[-1])
        place = int(np.searchsorted(passed, point / 100 * passed[-1]))
        return float(self.values[min(place, len(own) - 1)])


class Side:
    """All rounds of one server, ready for resampling."""

    def __init__(self, rounds: Sequence[Round], statistics: Sequence[Statistic], num_requests: int) -> None:
        self._statistics = statistics
        self._durations = np.array([each.duration_s for each in rounds])
        self._totals = {
            each.key: np.array([round.totals.get(each.key, 0.0) for round in rounds])
            for each in statistics
            if not each.metric
        }
        metrics = dict.fromkeys(each.metric for each in statistics if each.metric)
        self._latencies = {metric: _latencies(rounds, metric, num_requests) for metric in metrics}
        self.num_values = sum(len(each.values) for each in self._latencies.values())

    def figures(self, round_weights: Array, request_weights: Array) -> list[float]:
        """Computes all statistics, in order."""
        duration_s = float(round_weights @ self._durations)
        found = {key: float(round_weights @ totals) / duration_s for key, totals in self._totals.items()}
        for metric, latencies in self._latencies.items():
            asked = [each for each in self._statistics if each.metric == metric]
            values = latencies.statistics(request_weights, [each.point for each in asked])
            found |= {each.key: value for each, value in zip(asked, values, strict=True)}
        return [found[each.key] for each in self._statistics]


def ratios(
    first: Sequence[Round], other: Sequence[Round], statistics: Sequence[Statistic], *, seed: int = 0
) -> list[Ratio]:
    """Compares every statistic that both servers have. Both had the same rounds of the same requests."""
    assert len(first) == len(other) >= 2, f"{len(first)} and {len(other)} rounds"
    num_rounds, num_requests = len(first), max(len(each.outcomes) for each in (*first, *other))
    sides = [Side(rounds, statistics, num_requests) for rounds in (first, other)]
    whole = [side.figures(np.ones(num_rounds), np.ones(num_rounds * num_requests)) for side in sides]
    work = sum(side.num_values for side in sides) or 1
    num_resamples = int(np.clip(MAX_WORK / work, MIN_RESAMPLES, NUM_RESAMPLES))
    rng = np.random.default_rng(seed)
    directions = np.array([each.direction for each in statistics])
    centre = directions * _log_ratio(*whole)
    drawn = [
        np.array([directions * resampled(sides, num_rounds, num_requests, rng) for _ in range(num_resamples)])
        for resampled in (_other_rounds, _other_requests)
    ]
    found = []
    for index, each in enumerate(statistics):
        by_round, by_request = (values[:, index][np.isfinite(values[:, index])] for values in drawn)
        if not isfinite(centre[index]) or not len(by_round) or not len(by_request):
            continue
        half = student_factor(num_rounds) * float(np.std(by_round))
        low, high = (float(end) for end in np.percentile(by_request, (LOW, HIGH)))
        ends = min(low, centre[index] - half), max(high, centre[index] + half)
        pair = (whole[0][index], whole[1][index])
        found.append(Ratio(each.label, each.key, *pair, *map(exp, (centre[index], *ends))))
    return found


def _other_rounds(sides: Sequence[Side], num_rounds: int, num_requests: int, rng: np.random.Generator) -> Array:
    rounds = rng.multinomial(num_rounds, np.full(num_rounds, 1 / num_rounds)).astype(np.float64)
    return _log_ratio(*(side.figures(rounds, np.repeat(rounds, num_requests)) for side in sides))


def _other_requests(sides: Sequence[Side], num_rounds: int, num_requests: int, rng: np.random.Generator) -> Array:
    requests = rng.multinomial(num_requests, np.full(num_requests, 1 / num_requests), size=num_rounds)
    return _log_ratio(*(side.figures(np.ones(num_rounds), requests.ravel().astype(float)) for side in sides))


def _log_ratio(first: Sequence[float], other: Sequence[float]) -> Array:
    """NaN where either is missing or 0."""
    pairs = zip(first, other, strict=True)
    return np.array([log(a) - log(b) if a > 0 and b > 0 else float("nan") for a, b in pairs])


def _latencies(rounds: Sequence[Round], metric: str, num_requests: int) -> Latencies:
    values: list[float] = []
    requests: list[int] = []
    for number, each in enumerate(rounds):
        for outcome in each.outcomes:
            if outcome.is_ok:
                found = values_ms([outcome], metric)
                values += found
                requests += [number * num_requests + outcome.index] * len(found)
    return Latencies(values, requests)

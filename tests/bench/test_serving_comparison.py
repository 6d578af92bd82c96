"""Ratios with intervals on made-up figures: wide enough for equal servers, narrow enough for unequal ones."""

from math import exp, log, sqrt
from statistics import mean, stdev
from typing import Any

import numpy as np
import pytest

from saccade.bench.serving.serving_comparison import Ratio, ratios, with_interval
from saccade.bench.serving.serving_stats import RATES_AND_TIMES, Figures

NUM_ROUNDS = 6


def made(seed: int, speed: float = 1.0, drift: float = 0.0, rounds: int = NUM_ROUNDS) -> list[Figures]:
    """The figures of a server's rounds, with noise of its own, and drift by round that all servers have."""
    own = np.random.default_rng(seed)
    found = []
    for number in range(rounds):
        slow = (1 + drift * number) / speed
        rate, ttft = 80 / slow * own.normal(1, 0.03), 300 * slow * own.normal(1, 0.03)
        found.append(figures(request_throughput=float(rate), mean_ttft_ms=float(ttft), p99_ttft_ms=float(2 * ttft)))
    return found


def figures(**known: float) -> Figures:
    return dict.fromkeys((key for _, key, _ in RATES_AND_TIMES), None) | known


def compared(first: list[Figures], other: list[Figures]) -> dict[str, Ratio]:
    return ratios(over_all(first), over_all(other), list(zip(first, other, strict=True)))


def over_all(rounds: list[Figures]) -> Figures:
    return figures(**{key: mean(one[key] for one in rounds) for key, value in rounds[0].items() if value})


@pytest.mark.parametrize("rounds", [2, 3, NUM_ROUNDS])
def test_an_interval_of_equal_servers_misses_once_in_twenty_times(rounds: int) -> None:
    pairs = [compared(made(seed, rounds=rounds), made(1000 + seed, rounds=rounds)) for seed in range(400)]
    for key in ("request_throughput", "mean_ttft_ms"):
        assert 0.02 < sum(not pair[key].includes_one for pair in pairs) / len(pairs) < 0.08, key
    assert all(pair[key].low <= pair[key].ratio <= pair[key].high for pair in pairs for key in pair)
    assert all((pair[key].verdict == "") == pair[key].includes_one for pair in pairs for key in pair)


def test_a_server_twice_as_fast_is_ahead_in_everything() -> None:
    fast, slow = made(1, 2.0), made(2)
    for key, ratio in compared(fast, slow).items():
        assert ratio.low < 2 < ratio.high and ratio.verdict == "better", key
    for key, ratio in compared(slow, fast).items():
        assert ratio.high < 1 and ratio.verdict == "worse", key


def test_a_ratio_and_its_inverse_are_the_same_statement() -> None:
    there, back = compared(made(1), made(2, 1.2)), compared(made(2, 1.2), made(1))
    for key, ratio in there.items():
        inverse = back[key]
        assert (inverse.ratio, inverse.low, inverse.high) == pytest.approx(
            (1 / ratio.ratio, 1 / ratio.high, 1 / ratio.low)
        )


def test_drift_that_both_have_cancels_out() -> None:
    """Rounds are compared with each other, so a machine that gets slower does not widen the interval of a ratio."""
    steady, drifting = compared(made(1), made(2)), compared(made(1, drift=0.4), made(2, drift=0.4))
    for key, ratio in steady.items():
        told = drifting[key]
        assert (told.ratio, told.low, told.high) == pytest.approx((ratio.ratio, ratio.low, ratio.high))


@pytest.mark.parametrize(("count", "quantile"), [(2, 12.706), (3, 4.303), (10, 2.262), (21, 2.086), (1001, 1.962)])
def test_few_rounds_widen_the_interval(count: int, quantile: float) -> None:
    """By Student's t."""
    logs = [log(1.1 + 0.01 * (-1) ** number) for number in range(count)]
    half = quantile * stdev(logs) / sqrt(count)
    expected = [exp(mean(logs) + off) for off in (0, -half, half)]
    assert with_interval(logs) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("missing", [None, 0.0])
def test_figures_that_a_server_does_not_have_get_no_ratio(missing: Any) -> None:
    """One token a request leaves no time between tokens, and there may be no good request in a round."""
    first, other = made(1), made(2)
    assert compared(first, other).keys() == {"request_throughput", "mean_ttft_ms", "p99_ttft_ms"}
    other[1] = other[1] | {"p99_ttft_ms": missing}
    found = ratios(first[0], other[0], list(zip(first, other, strict=True)))
    assert found.keys() == {"request_throughput", "mean_ttft_ms"}

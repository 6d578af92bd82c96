"""Ratios with intervals on made-up numbers: wide enough for equal servers, narrow enough for unequal ones."""

import numpy as np
import pytest

from saccade.bench.load.client_reply import Outcome
from saccade.bench.serving import serving_interval
from saccade.bench.serving.serving_against import statistics
from saccade.bench.serving.serving_interval import Latencies, Ratio, Round, ratios, student_factor

NUM_ROUNDS, NUM_REQUESTS = 6, 40


def made(seed: int, scale: float = 1.0, drift: float = 0.0, rounds: int = NUM_ROUNDS) -> list[Round]:
    """Rounds of a server: requests with lengths of their own (the same for every server), noise, drift by round."""
    own, shared = np.random.default_rng(seed), np.random.default_rng(99)
    found = []
    for number in range(rounds):
        slow = scale * (1 + drift * number)
        ttfts = shared.uniform(0.1, 0.5, NUM_REQUESTS) * own.normal(1, 0.1, NUM_REQUESTS) * slow
        outcomes = [
            Outcome(index, 0.0, float(ttft), float(ttft) + 0.2 * slow, (float(ttft), float(ttft) + 0.2 * slow), 2)
            for index, ttft in enumerate(ttfts)
        ]
        duration_s = float(sum(outcome.e2el_s for outcome in outcomes) / 8 * own.normal(1, 0.03))
        totals = {"request_throughput": NUM_REQUESTS, "output_throughput": 2.0 * NUM_REQUESTS}
        found.append(Round(outcomes, duration_s, totals))
    return found


def by_key(first: list[Round], other: list[Round]) -> dict[str, Ratio]:
    return {ratio.key: ratio for ratio in ratios(first, other, statistics())}


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_interval, "NUM_RESAMPLES", 200)


def test_equal_servers_are_not_told_apart() -> None:
    """An interval of 95 % misses once in twenty times."""
    pairs = [by_key(made(seed), made(100 + seed)) for seed in range(20)]
    for key in ("request_throughput", "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "mean_e2el_ms"):
        assert sum(pair[key].includes_one for pair in pairs) >= 18, key
        assert all(pair[key].low <= pair[key].ratio <= pair[key].high for pair in pairs)
        assert all(pair[key].verdict == "" for pair in pairs if pair[key].includes_one)


def test_a_server_twice_as_fast_is_ahead_in_everything() -> None:
    fast, slow = made(1, 0.5), made(2)
    for key, ratio in by_key(fast, slow).items():
        assert not ratio.includes_one and ratio.verdict == "better", key
        assert ratio.low < 2 < ratio.high or ratio.ratio == pytest.approx(2, rel=0.1)
    for ratio in by_key(slow, fast).values():
        assert not ratio.includes_one and ratio.verdict == "worse" and ratio.high < 1


def test_a_ratio_and_its_inverse_are_the_same_statement() -> None:
    there, back = by_key(made(1), made(2, 1.2)), by_key(made(2, 1.2), made(1))
    for key, ratio in there.items():
        assert (back[key].ratio, back[key].low, back[key].high) == pytest.approx(
            (1 / ratio.ratio, 1 / ratio.high, 1 / ratio.low), rel=0.05
        )


def test_drift_that_both_have_cancels_out() -> None:
    """Rounds are compared with each other, so a machine that gets slower does not widen the interval of a ratio."""
    steady, drifting = by_key(made(1), made(2)), by_key(made(1, drift=0.4), made(2, drift=0.4))
    for key in ("request_throughput", "mean_ttft_ms"):
        widths = [np.log(each[key].high / each[key].low) for each in (steady, drifting)]
        assert widths[1] < 2 * widths[0] and drifting[key].includes_one


def test_few_rounds_widen_the_interval() -> None:
    found = [student_factor(count) for count in range(2, 40)]
    assert [round(factor, 1) for factor in found[:5]] == [18.0, 5.3, 3.7, 3.1, 2.8] and found == sorted(found)[::-1]
    assert student_factor(1000) == pytest.approx(1.96, abs=0.01)
    two, eight = (by_key(made(1, rounds=count), made(2, rounds=count))["request_throughput"] for count in (2, 8))
    assert two.high / two.low > eight.high / eight.low


def test_two_rounds_give_the_interval_of_students_t() -> None:
    """Of the logarithms of two ratios: their mean plus and minus 12.7 times half of their distance."""
    outcomes = [Outcome(0, 0.0, 1.0, 1.0, (1.0,), 1)]
    first = [Round(outcomes, 1.0, {"request_throughput": total}) for total in (100.0, 104.0)]
    other = [Round(outcomes, 1.0, {"request_throughput": total}) for total in (100.0, 100.0)]
    ratio = by_key(first, other)["request_throughput"]
    half = 12.706 * np.log(1.04) / 2
    assert ratio.ratio == pytest.approx(1.02)
    assert np.log((ratio.low, ratio.high)) == pytest.approx(np.log(1.02) + np.array([-half, half]), rel=0.1)


def test_figures_that_a_server_does_not_have_get_no_ratio() -> None:
    """One token a request leaves no time between tokens; nobody told vision tokens."""
    found = by_key(made(1), made(2))
    assert "vision_token_throughput" not in found and "request_goodput" not in found
    single = [
        Round([Outcome(o.index, 0.0, o.ttft_s, o.ttft_s, (o.ttft_s,), 1) for o in each.outcomes], 1.0, each.totals)
        for each in made(1)
    ]
    assert not {"mean_itl_ms", "p99_tpot_ms"} & by_key(single, single).keys()


def test_weighted_figures_are_those_of_repeated_values() -> None:
    values = [5.0, 1.0, 4.0, 2.0]
    latencies = Latencies(values, [0, 1, 2, 3])
    weights = np.array([0.0, 3.0, 1.0, 2.0])
    repeated = [1.0, 1.0, 1.0, 2.0, 2.0, 4.0]
    mean, median, top = latencies.statistics(weights, (None, 50.0, 99.0))
    assert mean == pytest.approx(np.mean(repeated)) and median == 1.0 and top == 4.0
    assert np.isnan(latencies.statistics(np.zeros(4), (None,))).all()


def test_failed_requests_are_in_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [
        Round([*each.outcomes[1:], Outcome(0, 0.0, error="timeout")], each.duration_s, each.totals) for each in made(1)
    ]
    assert by_key(broken, made(1))["mean_ttft_ms"].ratio == pytest.approx(1, rel=0.1)


def test_gaps_without_number_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_interval, "MAX_VALUES", 10)
    latencies = Latencies([float(value) for value in range(95)], [0] * 95)
    assert len(latencies.values) == 10 and latencies.values[-1] == 90

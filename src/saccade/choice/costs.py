"""The cheapest way to run a batch, from times measured at start-up, without rules of thumb about padding.

A run's cost is the time until its results are ready plus the time it occupies the host: an eager run launches hundreds
of kernels one by one, and meanwhile nothing else is launched for any request. A replay occupies the host only briefly.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from saccade.config import Tier

_MAX_ROUNDS = 9
_ENOUGH_S = 0.1


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by rows: constant up to the first measured point, linear between points, proportional beyond the last."""

    points: tuple[tuple[int, float], ...]

    def at(self, rows: int) -> float:
        sizes = [size for size, _ in self.points]
        i = bisect_left(sizes, rows)
        if i == 0:
            return self.points[0][1]
        if i == len(sizes):
            size, seconds = self.points[-1]
            return seconds * rows / size
        (low, fast), (high, slow) = self.points[i - 1], self.points[i]
        return fast + (slow - fast) * (rows - low) / (high - low)

    def within(self, seconds: float) -> int:
        """The largest number of rows that takes at most `seconds`; 0 if one row takes longer."""
        rows, longest = self.points[-1]
        if seconds >= longest:
            return int(rows * seconds / longest)
        return bisect_right(range(rows + 1), seconds, lo=1, key=self.at) - 1


@dataclass(frozen=True, slots=True)
class TierCosts:
    """The cost of eager runs by real rows, and of replays by the graph's rows."""

    eager: Curve
    graph: Curve

    def cheapest(self, rows_by_tier: Mapping[Tier, int]) -> Tier:
        """The cheapest tier for the rows it would process. A replay wins a tie."""
        order = (Tier.EXACT, Tier.CAPACITY, Tier.EAGER)
        seconds = {t: (self.eager if t is Tier.EAGER else self.graph).at(rows) for t, rows in rows_by_tier.items()}
        return min(seconds, key=lambda tier: (seconds[tier], order.index(tier)))


def measure(
    ways: Sequence[Callable[[int], object]], sizes: Sequence[int], wait: Callable[[], None], num_rounds: int = 0
) -> list[Curve]:
    """The cost of every way at each size: the median of a few rounds. Ways alternate, so that clock drift favours none.
    Start-up waits for this, so slow runs get fewer rounds. `num_rounds` fixes their number instead, because ranks that
    measure together must run equally many."""
    points: list[list[tuple[int, float]]] = [[] for _ in ways]
    for size in sizes:
        for way in ways:
            way(size)
        rounds = [[_timed(way, size, wait) for way in ways]]
        while len(rounds) < num_rounds or (not num_rounds and _are_too_few(rounds)):
            rounds.append([_timed(way, size, wait) for way in ways])
        for found, times in zip(points, zip(*rounds, strict=True), strict=True):
            found.append((size, median(times)))
    return [Curve(tuple(found)) for found in points]


def _are_too_few(rounds: Sequence[Sequence[float]]) -> bool:
    return len(rounds) < _MAX_ROUNDS and sum(map(sum, rounds)) < _ENOUGH_S


def _timed(way: Callable[[int], object], size: int, wait: Callable[[], None]) -> float:
    """Seconds per call until the results are ready, plus seconds per call until the host is free again. Measured over
    two calls in a row, because the host prepares the second while the device runs the first."""
    wait()
    started = perf_counter()
    for _ in range(2):
        way(size)
    returned = perf_counter()
    wait()
    return (perf_counter() - started + returned - started) / 2

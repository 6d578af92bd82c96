"""The gate: from times measured at start-up, the cheapest way to run a batch. No rule of thumb about padding."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from saccade.config import Tier


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by number of rows: straight lines between measured points, in proportion beyond the last."""

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


@dataclass(frozen=True, slots=True)
class Gate:
    """Times of eager runs by real rows, and of replays by the rows of the graph."""

    eager: Curve
    graph: Curve

    def seconds(self, tier: Tier, rows: int) -> float:
        return (self.eager if tier is Tier.EAGER else self.graph).at(rows)

    def cheapest(self, rows_by_tier: Mapping[Tier, int]) -> Tier:
        """The tier that takes least time for the rows it would process. An eager run wins what is too close to call:
        a replay that is chosen is a faster one."""
        order = (Tier.EXACT, Tier.CAPACITY, Tier.EAGER)

        def cost(tier: Tier) -> tuple[float, int]:
            seconds = self.seconds(tier, rows_by_tier[tier])
            return seconds * (1 - _TOO_CLOSE if tier is Tier.EAGER else 1), order.index(tier)

        return min(rows_by_tier, key=cost)

    def table(self) -> str:
        """What was measured, one line a size."""
        lines = [f"{'rows':>8} {'eager ms':>10} {'graph ms':>10}  cheaper"]
        for rows, seconds in self.graph.points:
            eager = self.eager.at(rows)
            cheaper = "graph" if seconds <= eager else "eager"
            lines.append(f"{rows:>8} {eager * 1e3:>10.3f} {seconds * 1e3:>10.3f}  {cheaper}")
        return "\n".join(lines)


def measure(ways: Sequence[Callable[[int], object]], sizes: Sequence[int], wait: Callable[[], None]) -> list[Curve]:
    """Time every way for each size: the median of a few turns, each until the device is done. Ways take turns, so that
    a device whose clock wanders favours none of them. It is part of the start, so it is short: what takes long to run
    needs few turns to be known."""
    points: list[list[tuple[int, float]]] = [[] for _ in ways]
    for size in sizes:
        for way in ways:
            way(size)
        rounds = [[_timed(way, size, wait) for way in ways]]
        while len(rounds) < _MOST_ROUNDS and (len(rounds) < _FEWEST_ROUNDS or sum(map(sum, rounds)) < _ENOUGH_S):
            rounds.append([_timed(way, size, wait) for way in ways])
        for found, times in zip(points, zip(*rounds, strict=True), strict=True):
            found.append((size, median(times)))
    return [Curve(tuple(found)) for found in points]


_FEWEST_ROUNDS, _MOST_ROUNDS = 2, 9
_ENOUGH_S = 0.1
_TOO_CLOSE = 0.02  # of an eager run: two measurements of the same run differ by about as much


def _timed(way: Callable[[int], object], size: int, wait: Callable[[], None]) -> float:
    """Of one call of two: a batch may take several passes, and while the device is at the first of them, the host
    prepares the next. Calls one by one would charge an eager run with a wait that is there only once."""
    wait()
    started = perf_counter()
    for _ in range(2):
        way(size)
    wait()
    return (perf_counter() - started) / 2

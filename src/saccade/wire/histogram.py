"""Counts of values by size, as in Prometheus."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(slots=True)
class Histogram:
    """`counts` has one entry for each upper edge in `edges`, and one for larger values."""

    edges: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    @classmethod
    def of(cls, edges: Sequence[float]) -> "Histogram":
        return cls(tuple(edges), [0] * (len(edges) + 1))

    def note(self, value: float) -> None:
        self.counts[bisect_left(self.edges, value)] += 1
        self.total += value

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """For each edge, the number of values up to it."""
        edges = [*(str(float(edge)) for edge in self.edges), "+Inf"]
        return [*zip(edges, map(float, accumulate(self.counts)), strict=True)]

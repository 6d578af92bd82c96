"""A line of those who wait, fair between callers."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")

MANY = 1024  # callers to remember before those are forgotten that have nothing waiting


class FairLine(Generic[T]):
    """Next is the caller for whom least was begun, by cost. One who had nothing waiting counts as much as the last one
    that was begun, so nobody saves up. Of a caller's own, the one with the least rank is next, then the oldest. So a
    newcomer waits for at most one of each other caller, however many they have."""

    def __init__(self) -> None:
        self._lines: dict[str, list[tuple[float, int, float, T]]] = {}
        self._ends: dict[str, float] = {}  # of what was begun for each caller, on a clock of costs
        self._now = 0.0
        self._serials = count()
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[T]:
        return (item for line in self._lines.values() for *_, item in line)

    def put(self, caller: str, item: T, *, cost: float = 1.0, rank: float = 0.0) -> None:
        assert cost > 0, f"something of {caller!r} costs {cost}"
        heappush(self._lines.setdefault(caller, []), (rank, next(self._serials), cost, item))
        self._num += 1

    def first(self) -> T:
        """Who is next."""
        return self._lines[self._next_caller()][0][3]

    def take(self) -> T:
        """Begins the next one."""
        caller = self._next_caller()
        self._now = self._start(caller)
        *_, cost, item = heappop(self._lines[caller])
        self._ends[caller] = self._now + cost
        self._shorten(caller)
        if not self._lines:
            self._ends, self._now = {}, 0.0
        elif len(self._ends) > MANY + len(self._lines):
            self._ends = {name: end for name, end in self._ends.items() if name in self._lines}
        return item

    def leave(self, caller: str, item: T) -> None:
        """Does nothing if it was taken."""
        line = self._lines.get(caller, [])
        kept = [entry for entry in line if entry[3] is not item]
        if len(kept) < len(line):
            heapify(kept)
            self._lines[caller] = kept
            self._shorten(caller)

    def clear(self) -> None:
        self._lines.clear()
        self._num = 0

    def _next_caller(self) -> str:
        return min(self._lines, key=self._start)

    def _start(self, caller: str) -> float:
        return max(self._now, self._ends.get(caller, 0.0))

    def _shorten(self, caller: str) -> None:
        self._num -= 1
        if not self._lines[caller]:
            del self._lines[caller]

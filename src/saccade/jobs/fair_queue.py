"""A queue that is fair between callers."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")

MANY = 1024  # callers to remember before those with nothing waiting are forgotten


class FairQueue(Generic[T]):
    """Start-time fair queueing. The next item comes from the caller that has been served the least, by cost. An idle
    caller gains no credit: its clock catches up with the last item served. A caller's own items come by lowest rank,
    then oldest first. So a newcomer waits for at most one item of each other caller, however many they have queued."""

    def __init__(self) -> None:
        self._queues: dict[str, list[tuple[float, int, float, T]]] = {}
        self._ends: dict[str, float] = {}  # virtual time, counted in costs, at which each caller's last item ends
        self._now = 0.0
        self._serials = count()
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[T]:
        return (item for queue in self._queues.values() for *_, item in queue)

    def put(self, caller: str, item: T, *, cost: float = 1.0, rank: float = 0.0) -> None:
        assert cost > 0, f"something of {caller!r} costs {cost}"
        heappush(self._queues.setdefault(caller, []), (rank, next(self._serials), cost, item))
        self._num += 1

    def first(self) -> T:
        return self._queues[self._next_caller()][0][3]

    def take(self) -> T:
        caller = self._next_caller()
        self._now = self._start(caller)
        *_, cost, item = heappop(self._queues[caller])
        self._ends[caller] = self._now + cost
        self._shorten(caller)
        if not self._queues:
            self._ends, self._now = {}, 0.0
        elif len(self._ends) > MANY + len(self._queues):
            self._ends = {name: end for name, end in self._ends.items() if name in self._queues}
        return item

    def leave(self, caller: str, item: T) -> None:
        """Remove an item; does nothing if it was already taken."""
        queue = self._queues.get(caller, [])
        kept = [entry for entry in queue if entry[3] is not item]
        if len(kept) < len(queue):
            heapify(kept)
            self._queues[caller] = kept
            self._shorten(caller)

    def clear(self) -> None:
        self._queues.clear()
        self._num = 0

    def _next_caller(self) -> str:
        return min(self._queues, key=self._start)

    def _start(self, caller: str) -> float:
        return max(self._now, self._ends.get(caller, 0.0))

    def _shorten(self, caller: str) -> None:
        self._num -= 1
        if not self._queues[caller]:
            del self._queues[caller]

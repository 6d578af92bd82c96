"""Threads for work that would block the event loop, and how long that work waits for one."""

import asyncio
from collections.abc import Callable
from itertools import count
from time import monotonic
from typing import TypeVar

from saccade.errors import contained
from saccade.jobs.fair_threads import FairThreads

T = TypeVar("T")


class WorkQueue:
    """Used from one event loop. A cancelled call leaves the queue, and callers take turns."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = FairThreads(num_threads, name)
        self._serials = count()
        self._waiting: dict[int, float] = {}  # since when, in order of arrival

    async def run(self, work: Callable[[], T], caller: str = "") -> T:
        serial = next(self._serials)
        self._waiting[serial] = monotonic()

        def begin() -> T:
            self._waiting.pop(serial, None)
            with contained():
                return work()

        try:
            return await asyncio.wrap_future(self._threads.submit(begin, caller))
        finally:
            self._waiting.pop(serial, None)

    @property
    def oldest_s(self) -> float:
        """How long the first entry of the queue has waited."""
        first = next(iter(self._waiting.copy().values()), None)  # threads remove entries meanwhile
        return 0.0 if first is None else monotonic() - first

    def shutdown(self) -> None:
        self._threads.shutdown()

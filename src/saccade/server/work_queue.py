"""Threads for work that would block the event loop, and how long it waits for one."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from time import monotonic
from typing import TypeVar

from saccade.errors import contained

T = TypeVar("T")


class WorkQueue:
    """Used from one event loop. A cancelled call leaves the queue."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._serials = count()
        self._waiting: dict[int, float] = {}  # since when, in the order of coming

    async def run(self, work: Callable[[], T]) -> T:
        serial = next(self._serials)
        self._waiting[serial] = monotonic()

        def begin() -> T:
            self._waiting.pop(serial, None)
            with contained():
                return work()

        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, begin)
        finally:
            self._waiting.pop(serial, None)

    @property
    def oldest_s(self) -> float:
        """How long the first in the queue has waited."""
        first = next(iter(self._waiting.copy().values()), None)  # threads take from it meanwhile
        return 0.0 if first is None else monotonic() - first

    def shutdown(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

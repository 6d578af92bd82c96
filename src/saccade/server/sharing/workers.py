"""Where the work for requests runs: on the event loop, or on threads for text, for bodies and for media."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from saccade.errors import contained
from saccade.jobs.fair_threads import FairSlots, FairThreads
from saccade.machine import usable_cores
from saccade.server.sharing.loop_work import LoopWork

P = ParamSpec("P")
T = TypeVar("T")

MIN_THREADS, MAX_THREADS = 4, 16
PARSE_THREADS = 2


class Workers:
    def __init__(self, num_threads: int, *, num_media_requests: int) -> None:
        """`num_threads=0` picks a number that suits the CPU."""
        num_threads = num_threads or max(MIN_THREADS, min(usable_cores(), MAX_THREADS))
        self._in_loop = LoopWork()
        self._preparing = FairThreads(num_threads, "prepare")
        self._parsing = FairThreads(PARSE_THREADS, "parse")
        # Media have their own threads, so that text never waits behind them: one per request, because most wait for the
        # processes that decode. Slots let `num_threads` of them work at a time.
        self._media_threads = FairThreads(num_media_requests, "media")
        self._media_slots = FairSlots(num_threads)
        self._parallel = ThreadPoolExecutor(num_threads, thread_name_prefix="parallel")

    @property
    def oldest_s(self) -> float:
        """How long the first request in the queue has waited to be prepared."""
        return self._preparing.oldest_s

    async def in_loop(self, caller: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs work that takes less time than a switch between threads. A cancelled call leaves the queue."""
        return await self._in_loop.run(lambda: work(*args, **kwargs), caller)

    async def in_thread(self, caller: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs work that would block the event loop. Callers take turns; a cancelled call leaves the queue."""
        return await _done(self._preparing, caller, lambda: work(*args, **kwargs))

    async def in_parser(self, caller: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Parses a body on dedicated threads, so that bodies never queue behind images."""
        return await _done(self._parsing, caller, lambda: work(*args, **kwargs))

    async def in_media_thread(self, caller: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Like `in_thread`, for requests with images or videos."""

        def run() -> T:
            self._media_slots.acquire(caller)
            try:
                return work(*args, **kwargs)
            finally:
                self._media_slots.release()

        return await _done(self._media_threads, caller, run)

    @contextmanager
    def waiting(self, caller: str) -> Iterator[None]:
        """Lets another media thread work while this one waits for a process."""
        self._media_slots.release()
        try:
            yield
        finally:
            self._media_slots.acquire(caller)

    def submit_parallel(self, work: Callable[[], T]) -> Future[T]:
        """Runs work in another thread while a media thread decodes."""
        return self._parallel.submit(work)

    def shutdown(self) -> None:
        for threads in (self._preparing, self._parsing, self._media_threads):
            threads.shutdown()
        self._parallel.shutdown(wait=False, cancel_futures=True)


async def _done(threads: FairThreads, caller: str, work: Callable[[], T]) -> T:
    def begin() -> T:
        with contained():
            return work()

    return await asyncio.wrap_future(threads.submit(begin, caller))

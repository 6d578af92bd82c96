"""Short work that the event loop does itself, in small slices."""

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Any, TypeVar

from saccade.errors import contained
from saccade.jobs.fair_queue import FairQueue

T = TypeVar("T")

SLICE_S = 0.002  # then the loop turns to its other work


class LoopWork:
    """Runs one piece of work after the other; callers take turns. Threads would share the GIL with each other and the
    loop, so of many requests that arrive at once the first would be ready hardly sooner than the last."""

    def __init__(self, slice_s: float = SLICE_S) -> None:
        self._slice_s = slice_s
        self._queue: FairQueue[tuple[asyncio.Future[Any], Callable[[], Any]]] = FairQueue()
        self._is_due = False

    async def run(self, work: Callable[[], T], caller: str = "") -> T:
        """A cancelled call is skipped."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._queue.put(caller, (future, work))
        if not self._is_due:
            self._is_due = True
            loop.call_soon(self._run_slice, loop)
        return await future

    def _run_slice(self, loop: asyncio.AbstractEventLoop) -> None:
        end = monotonic() + self._slice_s
        try:
            while self._queue:
                _do(*self._queue.take())
                if monotonic() >= end:
                    break
        finally:
            self._is_due = bool(self._queue)
            if self._is_due:
                loop.call_soon(self._run_slice, loop)


def _do(future: "asyncio.Future[Any]", work: Callable[[], Any]) -> None:
    if future.done():  # cancelled
        return
    try:
        with contained():
            future.set_result(work())
    except StopIteration as error:  # futures do not accept it
        future.set_exception(RuntimeError(f"the work ended with {error!r}"))
    except Exception as error:
        future.set_exception(error)
    except BaseException:
        future.cancel()
        raise

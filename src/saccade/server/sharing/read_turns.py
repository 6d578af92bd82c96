"""Whose body is read next. The event loop serves every connection that has data before it does anything else, so a few
hundred large bodies at once would delay probes by seconds."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from saccade.jobs.fair_queue import FairQueue

AT_A_TIME = 8
PATIENCE_S = 0.05  # a client that sends nothing loses its turn after this


class ReadTurns:
    """A turn covers one part of a body. Callers take turns, and nothing is read from a connection without one. A slow
    client loses its turn, but the part that it then sends is still read."""

    def __init__(self, at_a_time: int = AT_A_TIME) -> None:
        self._num_free = at_a_time
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()

    @asynccontextmanager
    async def turn(self, caller: str) -> AsyncIterator[None]:
        await self._take(caller)
        is_over = False

        def end() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                self._pass_on()

        timer = asyncio.get_running_loop().call_later(PATIENCE_S, end)
        try:
            yield
        finally:
            timer.cancel()
            end()

    async def _take(self, caller: str) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        mine = asyncio.get_running_loop().create_future()
        self._queue.put(caller, mine)
        try:
            await mine
        except asyncio.CancelledError:
            self._queue.leave(caller, mine)
            if mine.done() and not mine.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._queue:
            if not (first := self._queue.take()).done():
                first.set_result(None)
                return
        self._num_free += 1

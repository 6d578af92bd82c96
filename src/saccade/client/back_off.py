"""When to restart a dead engine, and when to give up."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import TypeVar

from saccade.errors import SaccadeError

T = TypeVar("T")

FIRST_DELAY_S, MAX_DELAY_S, MAX_TRIES = 1.0, 60.0, 5
STEADY_S = 600.0  # an engine that was up for this long gets all its tries back

_log = logging.getLogger(__name__)


class BackOff:
    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._num_tries, self._ready_at = 0, clock()

    def note_death(self) -> None:
        if self._clock() - self._ready_at >= STEADY_S:
            self._num_tries = 0

    def next_delay_s(self) -> float | None:
        """Seconds to wait before the next try; None to give up."""
        if self._num_tries == MAX_TRIES:
            return None
        self._num_tries += 1
        doubled: float = FIRST_DELAY_S * 2 ** (self._num_tries - 1)
        return min(doubled, MAX_DELAY_S)

    async def restarted(self, start: Callable[[], Awaitable[T]], name: str) -> T | None:
        """What `start` returns once it succeeds; None to give up."""
        while (delay_s := self.next_delay_s()) is not None:
            await asyncio.sleep(delay_s)
            try:
                found = await start()
            except Exception as error:
                trace = None if isinstance(error, SaccadeError | OSError) else error
                _log.error("%s could not be restarted: %s", name, error, exc_info=trace)
            else:
                self._ready_at = self._clock()
                return found
        return None

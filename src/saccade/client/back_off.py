"""When to restart a dead engine, and when to give up."""

from collections.abc import Callable
from time import monotonic

FIRST_DELAY_S, MAX_DELAY_S, MAX_TRIES = 1.0, 60.0, 5
STEADY_S = 600.0  # an engine that was up for this long gets all its tries back


class BackOff:
    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._num_tries, self._ready_at = 0, clock()

    def note_ready(self) -> None:
        self._ready_at = self._clock()

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

"""How many requests are in. Counted before anything is read or decoded, so that a full server answers at once."""

from collections.abc import Iterator
from contextlib import contextmanager

from saccade.errors import CapacityError


class Place:
    """One admitted request. It is pending until it is handed to the engine."""

    def __init__(self, admission: "Admission") -> None:
        self._admission = admission
        self._num_bytes = 0
        self._is_pending = True

    def hold(self, num_bytes: int) -> None:
        """Counts a body that waits to be prepared; refused when all of them together are too large."""
        admission = self._admission
        if admission.pending_bytes + num_bytes > admission.max_pending_bytes:
            raise admission.refusal(f"requests of {admission.max_pending_bytes} bytes are being prepared")
        self._num_bytes += num_bytes
        admission.pending_bytes += num_bytes

    def pass_on(self) -> None:
        """The request is the engine's now."""
        if self._is_pending:
            self._is_pending = False
            self._admission.pending -= 1
            self._admission.pending_bytes -= self._num_bytes
            self._num_bytes = 0


class Admission:
    """`inside` counts all admitted requests, `pending` those still being prepared, `pending_bytes` their bodies."""

    def __init__(self, *, max_inside: int, max_pending: int, max_pending_bytes: int, retry_after_s: float) -> None:
        self.max_inside, self.max_pending, self.max_pending_bytes = max_inside, max_pending, max_pending_bytes
        self._retry_after_s = retry_after_s
        self.inside = self.pending = self.pending_bytes = 0
        self.num_refused = 0

    @contextmanager
    def enter(self) -> Iterator[Place]:
        if self.inside >= self.max_inside:
            raise self.refusal(f"{self.inside} requests are running and waiting")
        if self.pending >= self.max_pending:
            raise self.refusal(f"{self.pending} requests are being prepared")
        self.inside += 1
        self.pending += 1
        place = Place(self)
        try:
            yield place
        finally:
            place.pass_on()
            self.inside -= 1

    def refusal(self, met: str) -> CapacityError:
        self.num_refused += 1
        return CapacityError(f"{met}, which is the limit; try again later", retry_after_s=self._retry_after_s)

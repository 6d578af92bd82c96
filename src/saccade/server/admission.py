"""Limits on admitted requests, counted before anything is read or decoded, so that a full server answers at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from saccade.errors import CapacityError, RequestError
from saccade.inputs.allowance import StopWorkError


class Place:
    """One admitted request: its body is read, it is prepared, then handed to the engine. Its memory is released when it
    is handed on or leaves, but not before the thread preparing it has stopped."""

    def __init__(self, admission: "Admission") -> None:
        self._admission = admission
        self._num_bytes = 0
        self._is_reading, self._is_pending, self._is_working, self._is_gone = True, False, False, False

    def hold(self, num_bytes: int) -> None:
        """Counts memory for preparing the request: its body, its decoded images. Any thread may call it."""
        admission = self._admission
        with admission.lock:
            limit = admission.max_pending_bytes
            if self._num_bytes + num_bytes > limit:
                raise RequestError(
                    f"the request takes {self._num_bytes + num_bytes} bytes while it is prepared; "
                    f"the limit is {limit} (--max-pending-bytes)",
                    code="request_too_large",
                    status=413,
                )
            if admission.pending_bytes + num_bytes > limit:
                raise admission.refusal(f"requests of {limit} bytes are being prepared")
            self._num_bytes += num_bytes
            admission.pending_bytes += num_bytes

    def prepare(self) -> None:
        """The body has arrived."""
        admission = self._admission
        if admission.pending >= admission.max_pending:
            raise admission.refusal(f"{admission.pending} requests are being prepared")
        self._end_stage()
        self._is_pending = True
        admission.pending += 1

    def pass_on(self) -> None:
        """The engine has the request now."""
        self._end_stage()
        with self._admission.lock:
            if not self._is_working:
                self._release()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Wraps a thread's work for the request."""
        with self._admission.lock:
            self._is_working = True
        try:
            self.go_on()
            yield
        finally:
            with self._admission.lock:
                self._is_working = False
                if self._is_gone:
                    self._release()

    def go_on(self) -> None:
        """Raises if the request has left, so that no work is wasted on it."""
        if self._is_gone:
            raise StopWorkError

    def leave(self) -> None:
        self._is_gone = True
        self.pass_on()

    def _end_stage(self) -> None:
        self._admission.reading -= self._is_reading
        self._admission.pending -= self._is_pending
        self._is_reading = self._is_pending = False

    def _release(self) -> None:
        self._admission.pending_bytes -= self._num_bytes
        self._num_bytes = 0


class Admission:
    """`inside` counts all admitted requests, `reading` those whose body is still arriving, `pending` those being
    prepared, `pending_bytes` the memory of both. Slow senders take no places from other clients."""

    def __init__(
        self, *, max_inside: int, max_reading: int, max_pending: int, max_pending_bytes: int, retry_after_s: float
    ) -> None:
        self.max_inside, self.max_reading = max_inside, max_reading
        self.max_pending, self.max_pending_bytes = max_pending, max_pending_bytes
        self._retry_after_s = retry_after_s
        self.inside = self.reading = self.pending = self.pending_bytes = 0
        self.num_refused = 0
        self.lock = Lock()  # guards the byte counts, which threads change too

    @contextmanager
    def enter(self) -> Iterator[Place]:
        num_running = self.inside - self.reading
        if num_running >= self.max_inside:
            raise self.refusal(f"{num_running} requests are running and waiting")
        if self.pending >= self.max_pending:
            raise self.refusal(f"{self.pending} requests are being prepared")
        if self.reading >= self.max_reading:
            raise self.refusal(f"{self.reading} requests are being read")
        self.inside += 1
        self.reading += 1
        place = Place(self)
        try:
            yield place
        finally:
            place.leave()
            self.inside -= 1

    def refusal(self, met: str) -> CapacityError:
        self.num_refused += 1
        return CapacityError(f"{met}, which is the limit; try again later", retry_after_s=self._retry_after_s)

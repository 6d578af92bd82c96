"""Limits on admitted requests, checked before anything is read or decoded, so that a full server refuses at once."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from time import monotonic

from saccade.errors import CapacityError, RequestError
from saccade.inputs.allowance import StopWorkError
from saccade.server.http_errors import HttpError
from saccade.server.sharing.callers import Caller

REMEMBERED, RECENT_S = 64, 120.0
MAX_RETRY_S = 600.0
KEPT = 8  # one place in eight is reserved for callers with few requests, and one for requests without media
SMALL_BYTES = 2**20  # an eighth of the memory is reserved for requests up to this size


class Place:
    """One admitted request: its body is read, it is prepared, then passed to the engine. Its memory is released when it
    is passed on or leaves, but not before the thread that prepares it has stopped."""

    def __init__(self, admission: "Admission", caller: Caller) -> None:
        self._admission, self._caller = admission, caller
        self._num_bytes = 0
        self._is_reading, self._is_pending, self._is_working, self._is_gone = True, False, False, False
        self._has_media = False

    @property
    def caller(self) -> str:
        """The caller's name."""
        return self._caller.name

    @property
    def num_bytes(self) -> int:
        """Memory counted so far; until the request is prepared, that is its body."""
        return self._num_bytes

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
            most = limit if self._num_bytes + num_bytes <= SMALL_BYTES else limit - limit // KEPT
            others = admission.pending_bytes - self._num_bytes
            if others and admission.pending_bytes + num_bytes > most:
                raise admission.refusal(f"requests of {admission.pending_bytes} bytes are being prepared")
            self._num_bytes += num_bytes
            admission.pending_bytes += num_bytes

    def prepare(self) -> None:
        """The body has arrived."""
        admission = self._admission
        admission.check_pending(self._caller)
        self._end_stage()
        self._is_pending = True
        admission.pending += 1

    def prepare_media(self) -> None:
        """The request has images or videos. As these may take long, they leave places to text, even of one caller."""
        admission = self._admission
        if admission.pending_media >= admission.max_pending - 2 * (admission.max_pending // KEPT):
            raise admission.refusal(f"{admission.pending_media} requests with media are being prepared")
        self._has_media = True
        admission.pending_media += 1

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
            self.check_cancelled()
            yield
        finally:
            with self._admission.lock:
                self._is_working = False
                if self._is_gone:
                    self._release()

    def check_cancelled(self) -> None:
        """Raises if the request has left, so that no work is wasted on it."""
        if self._is_gone:
            raise StopWorkError

    def leave(self) -> None:
        self._is_gone = True
        self.pass_on()

    def _end_stage(self) -> None:
        self._admission.reading -= self._is_reading
        self._admission.pending -= self._is_pending
        self._admission.pending_media -= self._has_media
        self._is_reading = self._is_pending = self._has_media = False

    def _release(self) -> None:
        self._admission.pending_bytes -= self._num_bytes
        self._num_bytes = 0


class EndRate:
    """How fast requests end, from the last ones that did. Threads may ask while the event loop notes more."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=REMEMBERED)

    def note_end(self) -> None:
        self._ends.append(monotonic())

    def seconds_for(self, num_ends: int) -> float | None:
        """How long `num_ends` requests take to end; None if too few ended lately."""
        now = monotonic()
        lately = [end for end in self._ends.copy() if end > now - RECENT_S]
        return num_ends * (now - lately[0]) / len(lately) if len(lately) > 1 else None


class Admission:
    """`inside` counts all admitted requests, `reading` those whose body is still arriving, `pending` those being
    prepared (`pending_media` those with images or videos), `pending_bytes` the memory of both. Slow senders take no
    places from other clients, and a caller with many places leaves the last ones to others."""

    def __init__(
        self, *, max_inside: int, max_reading: int, max_pending: int, max_pending_bytes: int, retry_after_s: float
    ) -> None:
        self.max_inside, self.max_reading = max_inside, max_reading
        self.max_pending, self.max_pending_bytes = max_pending, max_pending_bytes
        self.max_running = 0  # out of `max_inside`; the others wait
        self._retry_after_s = retry_after_s
        self.pace = EndRate()
        self.inside = self.reading = self.pending = self.pending_media = self.pending_bytes = 0
        self.num_refused = 0
        self.lock = Lock()  # guards the byte counts, which threads change too

    @contextmanager
    def enter(self, caller: Caller) -> Iterator[Place]:
        caller.check(self._one_ends_s(caller))
        self._check_share(caller)
        num_running = self.inside - self.reading
        if num_running >= self.max_inside:
            raise self.refusal(f"{num_running} requests are running and waiting")
        self.check_pending(caller)
        if self._is_taken(caller, self.reading, self.max_reading):
            raise self.refusal(f"{self.reading} requests are being read")
        self.inside += 1
        self.reading += 1
        caller.inside += 1
        place = Place(self, caller)
        try:
            yield place
        finally:
            place.leave()
            self.inside -= 1
            caller.inside -= 1

    def check_pending(self, caller: Caller) -> None:
        if self._is_taken(caller, self.pending, self.max_pending):
            raise self.refusal(f"{self.pending} requests are being prepared")

    def refusal(self, reason: str) -> CapacityError:
        self.num_refused += 1
        return CapacityError(f"{reason}, which is the limit; try again later", retry_after_s=self.drained_s())

    def drained_s(self) -> float:
        """How long until all requests that wait now have started, if requests end as fast as they did lately."""
        return self._bounded(self.pace.seconds_for(max(self.inside - self.reading - self.max_running, 1)))

    def _one_ends_s(self, caller: Caller) -> float:
        """How long until one of the caller's requests ends, if they take as long as those of others."""
        return self._bounded(self.pace.seconds_for(max(self.inside // max(caller.inside, 1), 1)))

    def _bounded(self, seconds: float | None) -> float:
        return self._retry_after_s if seconds is None else min(max(seconds, self._retry_after_s), MAX_RETRY_S)

    def _check_share(self, caller: Caller) -> None:
        most = max(1, int(caller.limits.queue_share * self.max_inside))
        if caller.limits.queue_share < 1 and caller.inside >= most:
            self.num_refused += 1
            text = f"this caller has {caller.inside} of the server's {self.max_inside} places; the limit is {most} "
            raise HttpError(429, f"{text}(queue_share)", code="rate_limit_exceeded", retry_after_s=self.drained_s())
        if self._is_flood(caller, self.inside - self.reading, self.max_inside):
            raise self.refusal(f"{caller.inside} requests of this caller are running and waiting")

    def _is_taken(self, caller: Caller, num: int, limit: int) -> bool:
        return num >= limit or self._is_flood(caller, num, limit)

    def _is_flood(self, caller: Caller, num: int, limit: int) -> bool:
        """Whether the caller has many places, and only those reserved for callers with few are left."""
        kept = limit // KEPT
        return 0 < kept < caller.inside and num >= limit - kept

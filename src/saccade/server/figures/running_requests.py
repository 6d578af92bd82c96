"""The requests in the engine, and what the front end knows about them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

from saccade.wire.trace_records import MAX_REQUESTS


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """What the front end did for a request before the engine got it. `arrived` is on the monotonic clock; `seconds` has
    the duration of each stage."""

    public_id: str
    arrived: float
    seconds: Mapping[str, float]
    has_media: bool = False


class RunningRequests:
    """Requests in the engine by their engine id, and while a trace is recorded those that have ended."""

    def __init__(self) -> None:
        self._serials = count()
        self._inside: dict[str, PreparedRequest] = {}
        self._ended: dict[str, PreparedRequest] | None = None

    @contextmanager
    def inside(self, prepared: PreparedRequest) -> Iterator[str]:
        """Yields a unique id for the engine, because clients may reuse theirs."""
        engine_id = f"{next(self._serials)}"
        self._inside[engine_id] = prepared
        try:
            yield engine_id
        finally:
            del self._inside[engine_id]
            if self._ended is not None and len(self._ended) < MAX_REQUESTS:
                self._ended[engine_id] = prepared

    def ids_of(self, public_id: str | None) -> list[str]:
        """The engine's ids of a client's request, or of all if None."""
        return [name for name, one in self._inside.items() if public_id in (None, one.public_id)]

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._ended = {}
        try:
            yield
        finally:
            self._ended = None

    def known(self) -> dict[str, PreparedRequest]:
        return {**(self._ended or {}), **self._inside}

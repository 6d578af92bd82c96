"""What the front end knows about requests in the engine, for traces."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from saccade.wire.trace_records import MAX_REQUESTS


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """What the front end did for a request before the engine got it. `arrived` is on the monotonic clock; `seconds` has
    the duration of each stage."""

    public_id: str
    arrived: float
    seconds: Mapping[str, float]
    has_media: bool = False


class TracedRequests:
    """Requests in the engine by their engine id, and while a trace is recorded those that have ended."""

    def __init__(self) -> None:
        self._inside: dict[str, PreparedRequest] = {}
        self._ended: dict[str, PreparedRequest] | None = None

    def begin(self, engine_id: str, prepared: PreparedRequest) -> None:
        self._inside[engine_id] = prepared

    def end(self, engine_id: str) -> None:
        prepared = self._inside.pop(engine_id, None)
        if prepared is not None and self._ended is not None and len(self._ended) < MAX_REQUESTS:
            self._ended[engine_id] = prepared

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._ended = {}
        try:
            yield
        finally:
            self._ended = None

    def known(self) -> dict[str, PreparedRequest]:
        return {**(self._ended or {}), **self._inside}

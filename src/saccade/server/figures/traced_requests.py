"""What the front end knows of requests that are in the engine, for traces."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from saccade.wire.trace_records import MAX_REQUESTS


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """What the front end did for a request before the engine got it. Times are of the monotonic clock; `seconds` are
    those of its stages."""

    public_id: str
    arrived: float
    seconds: Mapping[str, float]
    has_media: bool = False


class TracedRequests:
    """Those inside, by the engine's ids; while a trace is recorded, also those that have ended."""

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

"""What an engine tells about its passes: the newest with their times, and a count for a request that asked."""

from typing import Literal

from msgspec import Struct

Stream = Literal["vision", "language"]


class PassShape(Struct, frozen=True):
    """One pass. `graph` is the key of the replayed graph; without one, `reason` says why. `rows` were asked for,
    `padded` were added."""

    phase: str
    graph: str
    reason: str
    rows: int
    padded: int


class PassRecord(Struct, frozen=True):
    """Passes that ran one after the other on a stream for `requests` requests. `start` is a time of the monotonic
    clock; `seconds` is None while they run."""

    number: int
    stream: Stream
    start: float
    seconds: float | None
    requests: int
    passes: tuple[PassShape, ...]


class PassCount(Struct, frozen=True):
    """How often passes of one graph, or of one reason for none, ran for a request, and their rows in all."""

    phase: str
    graph: str
    reason: str
    passes: int
    rows: int
    padded: int

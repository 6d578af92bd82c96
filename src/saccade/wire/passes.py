"""What an engine reports about its passes: the newest ones with their times, and counts for a request that asked."""

from typing import Literal

from msgspec import Struct

Stream = Literal["vision", "language"]


class PassShape(Struct, frozen=True):
    """One pass. `graph` is the key of the replayed graph; if there was none, `reason` says why. `rows` counts real
    rows, `padded` those added as padding."""

    phase: str
    graph: str
    reason: str
    rows: int
    padded: int


class PassRecord(Struct, frozen=True):
    """Passes that ran one after the other on a stream for `requests` requests. `start` is a monotonic time; `seconds`
    is None while they run."""

    number: int
    stream: Stream
    start: float
    seconds: float | None
    requests: int
    passes: tuple[PassShape, ...]


class PassCount(Struct, frozen=True):
    """How many passes a request had with one graph, or without one for the same reason, and their rows in total."""

    phase: str
    graph: str
    reason: str
    passes: int
    rows: int
    padded: int

"""A recording of what an engine did. All times are monotonic; all processes of a machine share that clock."""

from msgspec import Struct

MAX_TRACE_S = 60.0
MAX_PASSES, MAX_REQUESTS, MAX_LOADS = 50_000, 10_000, 50_000


class TracedPass(Struct, frozen=True, array_like=True):
    """A pass as it ran. `graph` is the key of the replayed graph; it is empty if the pass ran eagerly, and `reason`
    says why. `rows` counts real rows, `room` all computed ones."""

    phase: str
    step: int
    begin: float
    end: float
    graph: str
    reason: str
    rows: int
    room: int


class TracedRequest(Struct, frozen=True, array_like=True):
    """One output of a request. Times that it did not reach are None."""

    request_id: str
    arrived: float
    started: float | None
    first_token: float | None
    ended: float | None
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


class TracedLoad(Struct, frozen=True, array_like=True):
    time: float
    running: int
    waiting: int
    kv_usage: float


class EngineTrace(Struct, frozen=True, kw_only=True):
    """`num_dropped` counts events that did not fit."""

    begin: float
    end: float
    passes: list[TracedPass]
    requests: list[TracedRequest]
    loads: list[TracedLoad]
    num_dropped: int = 0

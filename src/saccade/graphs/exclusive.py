"""One user at a time: a second one is refused, not made to wait, because it would find the buffers changed."""

from threading import Lock, RLock
from types import TracebackType

from saccade.errors import GraphError


class Exclusive:
    """Buffers of one phase, and the lane that its graphs share memory with. Entered for one batch at a time: by one
    thread, and not again by whoever consumes the outputs. Phases of one lane may follow each other in one thread."""

    def __init__(self, phase: str, lane: "RLock") -> None:
        self._phase, self._lane, self._buffers = phase, lane, Lock()

    def __enter__(self) -> None:
        if not self._lane.acquire(blocking=False):
            raise GraphError(f"{self._phase} shares memory with a pass that runs in another thread; {_RULE}")
        if not self._buffers.acquire(blocking=False):
            self._lane.release()
            raise GraphError(f"{self._phase} was entered again by the consumer of its own outputs; {_RULE}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._buffers.release()
        self._lane.release()


_RULE = (
    "graphs have one set of buffers: run one batch at a time, or give each thread a runner with its own arena and lane"
)

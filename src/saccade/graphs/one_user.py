"""One user at a time: of a phase's buffers, and of the lane whose memory its graphs share."""

from threading import Lock

from saccade.errors import GraphError
from saccade.graphs.lane import Lane

_RULE = (
    "a graph has one set of buffers: run one batch at a time, or give each thread a runner with its own arena and lane"
)


class OneUser:
    """A thread that holds the lane may run other phases of the lane, but not the same phase again from the consumer of
    its outputs. A second user is refused, not queued, because it would find the buffers changed."""

    def __init__(self, phase: str, lane: Lane) -> None:
        self._phase, self._lane, self._buffers = phase, lane, Lock()

    def __enter__(self) -> None:
        if not self._lane.lock.acquire(blocking=False):
            raise GraphError(f"{self._phase} shares memory with a pass that runs in another thread; {_RULE}")
        if not self._buffers.acquire(blocking=False):
            self._lane.lock.release()
            raise GraphError(f"{self._phase} was entered again by the consumer of its own outputs; {_RULE}")
        self._lane.num_uses += 1

    def __exit__(self, *error: object) -> None:
        self._buffers.release()
        self._lane.lock.release()

"""Records what an engine does while somebody looks. Bounded: the newest are kept."""

from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

from saccade.scheduling.arrays import LiveRequest
from saccade.wire.engine_metrics import SchedulerStats
from saccade.wire.trace import MAX_LOADS, MAX_REQUESTS, EngineTrace, TracedLoad, TracedPass, TracedRequest

T = TypeVar("T")


class Newest(Generic[T]):
    """A list of at most `limit` items, and how many older ones were dropped."""

    def __init__(self, limit: int) -> None:
        self.items: deque[T] = deque(maxlen=limit)
        self._num_added = 0

    def add(self, item: T) -> None:
        self.items.append(item)
        self._num_added += 1

    @property
    def num_dropped(self) -> int:
        return self._num_added - len(self.items)


class TraceLog:
    def __init__(self, begin: float) -> None:
        self._begin = begin
        self._ended: Newest[TracedRequest] = Newest(MAX_REQUESTS)
        self._loads: Newest[TracedLoad] = Newest(MAX_LOADS)

    def note_load(self, now: float, stats: SchedulerStats) -> None:
        self._loads.add(TracedLoad(now, stats.running, stats.waiting, stats.kv_usage))

    def note_end(self, live: LiveRequest, now: float, reason: str) -> None:
        self._ended.add(_traced(live, now, reason))

    def close(
        self, now: float, live: Iterable[LiveRequest], passes: list[TracedPass], num_dropped_passes: int
    ) -> EngineTrace:
        """The whole trace, with the requests that still run."""
        return EngineTrace(
            begin=self._begin,
            end=now,
            passes=passes,
            requests=[*self._ended.items, *(_traced(one, None, "") for one in live)],
            loads=list(self._loads.items),
            num_dropped=num_dropped_passes + self._ended.num_dropped + self._loads.num_dropped,
        )


def _traced(live: LiveRequest, ended: float | None, reason: str) -> TracedRequest:
    request = live.request
    return TracedRequest(
        request.id,
        request.arrival,
        live.started,
        live.first_token,
        ended,
        reason,
        len(request.prompt_ids),
        request.num_cached_tokens,
        len(request.output_ids),
    )

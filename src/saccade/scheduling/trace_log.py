"""Records requests and load of an engine for a trace. Bounded: the newest records are kept."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from saccade.scheduling.arrays import LiveRequest
from saccade.scheduling.executing import Executor
from saccade.scheduling.scheduler import Scheduler
from saccade.wire.trace_records import MAX_LOADS, MAX_REQUESTS, EngineTrace, TracedLoad, TracedRequest

T = TypeVar("T")


class Newest(Generic[T]):
    """The newest items, at most `limit`, and how many older ones were dropped."""

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
    """Records from its creation until `end`."""

    def __init__(self, executor: Executor, live: Mapping[str, LiveRequest], clock: Callable[[], float]) -> None:
        self._executor, self._live, self._clock = executor, live, clock
        self._begin = clock()
        self._ended: Newest[TracedRequest] = Newest(MAX_REQUESTS)
        self._loads: Newest[TracedLoad] = Newest(MAX_LOADS)
        executor.time_passes()

    def end(self) -> EngineTrace:
        """Returns the records, including requests that still run."""
        passes, num_dropped = self._executor.take_passes()
        return EngineTrace(
            begin=self._begin,
            end=self._clock(),
            passes=passes,
            requests=[*self._ended.items, *(_traced(one, None, "") for one in self._live.values())],
            loads=list(self._loads.items),
            num_dropped=num_dropped + self._ended.num_dropped + self._loads.num_dropped,
        )

    def note_load(self, scheduler: Scheduler) -> None:
        stats = scheduler.stats()
        self._loads.add(TracedLoad(self._clock(), stats.running, stats.waiting, stats.kv_usage))

    def note_end(self, live: LiveRequest, reason: str) -> None:
        self._ended.add(_traced(live, self._clock(), reason))


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

"""The newest passes of an engine with their times, and pass counts for requests that ask for them. Bounded."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from saccade.choice.catalogue import Catalogue
from saccade.choice.key import GraphKey
from saccade.scheduling.executing import Lap
from saccade.scheduling.orders import Pass
from saccade.wire.passes import PassCount, PassRecord, PassShape, Stream

MAX_RECORDS = 512
_ROWS = {"vision": "targets", "prefill": "ids", "decode": "ids", "head": "rows", "sample": "sequences"}
_PassKind = tuple[str, GraphKey | None, str]  # phase, graph, and the reason if there is none
_Shape = tuple[_PassKind, int, int]  # with rows and padded rows
_Counts = dict[_PassKind, list[int]]  # passes, rows, padded rows


@dataclass(slots=True)
class PassEntry:
    number: int
    stream: Stream
    start: float
    num_requests: int
    shapes: list[_Shape]
    end: float | None = None
    lap: Lap | None = None

    @property
    def seconds(self) -> float | None:
        if self.lap is not None:
            return self.lap.seconds()
        return None if self.end is None else max(self.end - self.start, 0.0)


class PassLog:
    """Passes run in sequence, so one starts when it is launched or when the previous one has ended."""

    def __init__(self, catalogues: Mapping[str, Catalogue], clock: Callable[[], float]) -> None:
        self._rows = {name: catalogue.shape.rows for name, catalogue in catalogues.items()}
        self._clock = clock
        self._entries: deque[PassEntry] = deque(maxlen=MAX_RECORDS)
        self._number = 0
        self._language_end = 0.0
        self._counted: dict[str, _Counts] = {}

    def count_for(self, request_id: str) -> None:
        """Counts the passes of this request until `take_counts`."""
        self._counted[request_id] = {}

    def take_counts(self, request_id: str) -> tuple[PassCount, ...] | None:
        """Returns and forgets the counts of a request that has ended; None if it did not ask for them."""
        counts = self._counted.pop(request_id, None)
        if counts is None:
            return None
        return tuple(PassCount(phase, str(key or ""), why, *sums) for (phase, key, why), sums in counts.items())

    def add(
        self,
        stream: Stream,
        passes: Sequence[Pass],
        requests: Collection[str],
        start: float,
        lap: Lap | None = None,
        *,
        is_counted: bool = True,
    ) -> PassEntry:
        """Adds passes that were launched together. Without a lap to time them, `end` must be called. Later parts of a
        pass are not counted again for its requests."""
        self._number += 1
        entry = PassEntry(self._number, stream, start, len(requests), [], lap=lap)
        self._note(entry, passes, requests if is_counted else ())
        self._entries.append(entry)
        return entry

    def follow(self, entry: PassEntry, one: Pass, requests: Iterable[str]) -> None:
        """Adds a pass that runs right after those of an entry."""
        self._note(entry, [one], requests)

    def end(self, entry: PassEntry) -> None:
        """Notes that the passes of an entry have ended. Only the first call counts."""
        if entry.end is None:
            entry.start = max(entry.start, self._language_end)
            entry.end = self._language_end = self._clock()

    def records(self, since: int) -> list[PassRecord]:
        """Returns ended passes numbered above `since`, in order, up to the first one that still runs."""
        found, free_at = [], 0.0
        for entry in self._entries:
            seconds = entry.seconds
            if seconds is None:
                break
            start = max(entry.start, free_at)  # on a GPU it may be launched while the previous one runs
            if entry.end is not None:
                seconds = max(entry.end - start, 0.0)
            free_at = start + seconds
            if entry.number > since:
                shapes = tuple(PassShape(name, str(key or ""), why, *rows) for (name, key, why), *rows in entry.shapes)
                found.append(PassRecord(entry.number, entry.stream, start, seconds, entry.num_requests, shapes))
        return found

    def _note(self, entry: PassEntry, passes: Iterable[Pass], requests: Iterable[str]) -> None:
        shapes = [self._shape(one) for one in passes]
        entry.shapes += shapes
        if not self._counted:
            return
        for request_id in requests:
            counts = self._counted.get(request_id)
            if counts is not None:
                for kind, rows, padded in shapes:
                    sums = counts.setdefault(kind, [0, 0, 0])
                    sums[:] = sums[0] + 1, sums[1] + rows, sums[2] + padded

    def _shape(self, one: Pass) -> _Shape:
        decision, rows = one.decision, one.values[_ROWS[one.phase]].shape[-1]
        capacity = decision.key.capacity if decision.key else decision.padded_to
        num_padded = 0 if capacity is None else capacity[self._rows[one.phase]] - rows
        return (one.phase, decision.key, "" if decision.key else decision.why), rows, num_padded

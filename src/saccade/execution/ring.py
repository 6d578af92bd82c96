"""Which bytes of a shared memory are free. Only the writer knows; readers are told where each message lies."""

from collections import deque
from dataclasses import dataclass

from saccade.execution.codec import aligned


@dataclass(frozen=True, slots=True)
class MessageSpan:
    """The bytes of a message that somebody may still read."""

    sequence: int
    start: int
    end: int
    sent_at: float


class Ring:
    """Spans are taken and given back in the same order.

    When none is taken the next one begins at 0, so that usually only the first pages are touched: they stay in the
    processor's cache, and the rest costs no memory.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.spans: deque[MessageSpan] = deque()

    def find(self, num_bytes: int) -> int | None:
        """Where `num_bytes` would fit; None while they do not."""
        size = aligned(num_bytes)
        if not self.spans:
            return 0 if size <= self.capacity else None
        oldest, newest = self.spans[0], self.spans[-1]
        if newest.start < oldest.start:  # the newest are at the front again
            return newest.end if size <= oldest.start - newest.end else None
        if size <= self.capacity - newest.end:
            return newest.end
        return 0 if size <= oldest.start else None

    def take(self, sequence: int, start: int, num_bytes: int, now: float) -> None:
        self.spans.append(MessageSpan(sequence, start, start + aligned(num_bytes), now))

    def give_back(self, sequence: int) -> None:
        """All up to this one."""
        while self.spans and self.spans[0].sequence <= sequence:
            self.spans.popleft()

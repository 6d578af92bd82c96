"""Conversations that later requests can go on with, by the id of their last response. They are held in memory, within a
number of bytes; the ones that were used least recently go first."""

from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock
from typing import Any

VALUE_BYTES = 64  # about what a value takes beside its text
ENTRY_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Conversation:
    """Items of inputs and outputs, in order. They are shared, and never changed."""

    items: tuple[Any, ...]
    num_bytes: int

    def then(self, items: list[Any]) -> "Conversation":
        return Conversation((*self.items, *items), self.num_bytes + sum(map(size_of, items)))


NOTHING_SAID = Conversation((), ENTRY_BYTES)


class ResponseStore:
    """Callers find only what is their own. Requests are read in threads, so there is a lock."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._found: OrderedDict[tuple[str, str], Conversation] = OrderedDict()
        self._lock = Lock()
        self.num_bytes = 0

    @property
    def is_on(self) -> bool:
        return self._max_bytes > 0

    def get(self, caller: str, response_id: str) -> Conversation | None:
        with self._lock:
            found = self._found.get((caller, response_id))
            if found is not None:
                self._found.move_to_end((caller, response_id))
            return found

    def put(self, caller: str, response_id: str, conversation: Conversation) -> None:
        """Keeps it, unless it alone is more than all may be."""
        with self._lock:
            before = self._found.pop((caller, response_id), None)
            self.num_bytes -= 0 if before is None else before.num_bytes
            if conversation.num_bytes > self._max_bytes:
                return
            self._found[caller, response_id] = conversation
            self.num_bytes += conversation.num_bytes
            while self.num_bytes > self._max_bytes:
                self.num_bytes -= self._found.popitem(last=False)[1].num_bytes


def size_of(value: Any) -> int:
    """About how many bytes a JSON value takes. Bodies are not nested deeply, so this may call itself."""
    match value:
        case str():
            return VALUE_BYTES + len(value)
        case dict():
            return VALUE_BYTES + sum(len(name) + size_of(item) for name, item in value.items())
        case list():
            return VALUE_BYTES + sum(map(size_of, value))
    return VALUE_BYTES

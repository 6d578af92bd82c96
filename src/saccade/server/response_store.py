"""Conversations that later requests can go on with, by the id of their last response. They are held in memory, within a
number of bytes; the ones that were used least recently go first."""

from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock
from typing import Any

VALUE_BYTES = 64  # about what a value takes beside its text
ENTRY_BYTES = 1024
Key = tuple[str, str]  # caller, id of the response


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """Items of inputs and outputs, in order. They are shared, and never changed."""

    items: tuple[Any, ...]
    num_bytes: int

    def then(self, items: list[Any]) -> "StoredConversation":
        return StoredConversation((*self.items, *items), self.num_bytes + sum(map(size_of, items)))


NOTHING_SAID = StoredConversation((), ENTRY_BYTES)


class ResponseStore:
    """Callers find only what is their own. What running requests were asked is here, too, so that it counts: `begin`
    holds it, `finish` makes it a conversation that can go on, `drop` ends what came to nothing. Requests are read in
    threads, so there is a lock."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._running: set[Key] = set()
        self._found: OrderedDict[Key, StoredConversation] = OrderedDict()
        self._lock = Lock()
        self.num_bytes = 0

    @property
    def is_on(self) -> bool:
        return self._max_bytes > 0

    def get(self, caller: str, response_id: str) -> StoredConversation | None:
        key = (caller, response_id)
        with self._lock:
            if key in self._running or key not in self._found:
                return None
            self._found.move_to_end(key)
            return self._found[key]

    def begin(self, caller: str, response_id: str, conversation: StoredConversation) -> None:
        with self._lock:
            self._put((caller, response_id), conversation, is_running=True)

    def finish(self, caller: str, response_id: str, output: list[Any]) -> None:
        key = (caller, response_id)
        with self._lock:
            if key in self._running:
                self._put(key, self._found[key].then(output), is_running=False)

    def drop(self, caller: str, response_id: str) -> None:
        """Forgets it if it is still running."""
        with self._lock:
            if (caller, response_id) in self._running:
                self._remove((caller, response_id))

    def _put(self, key: Key, conversation: StoredConversation, *, is_running: bool) -> None:
        """Keeps it, unless it alone is more than all may be."""
        self._remove(key)
        if conversation.num_bytes > self._max_bytes:
            return
        self._found[key] = conversation
        self.num_bytes += conversation.num_bytes
        if is_running:
            self._running.add(key)
        while self.num_bytes > self._max_bytes:
            self._remove(next(iter(self._found)))

    def _remove(self, key: Key) -> None:
        found = self._found.pop(key, None)
        self.num_bytes -= 0 if found is None else found.num_bytes
        self._running.discard(key)


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

"""Conversations that later requests can continue, by the id of their last response. They are kept in memory up to a
limit in bytes; the least recently used are evicted first."""

from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock
from typing import Any

VALUE_BYTES = 64  # rough overhead of a value, on top of its text
ENTRY_BYTES = 1024
Key = tuple[str, str]  # caller, id of the response


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """Input and output items in order. Conversations share items, so these are never changed."""

    items: tuple[Any, ...]
    num_bytes: int

    def then(self, items: list[Any]) -> "StoredConversation":
        return StoredConversation((*self.items, *items), self.num_bytes + sum(map(size_of, items)))


EMPTY_CONVERSATION = StoredConversation((), ENTRY_BYTES)


class ResponseStore:
    """Callers see only their own conversations. The inputs of running requests are stored too, so that their bytes
    count: `begin` adds them, `finish` makes them a conversation that can be continued, `drop` removes those of failed
    requests. The lock is needed because requests are read in threads."""

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
        """Removes the conversation of a request that has not finished."""
        with self._lock:
            if (caller, response_id) in self._running:
                self._remove((caller, response_id))

    def _put(self, key: Key, conversation: StoredConversation, *, is_running: bool) -> None:
        """Stores a conversation, unless it alone exceeds the limit."""
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
    """Roughly how many bytes a JSON value takes. Recursion is safe: the depth of bodies is limited."""
    match value:
        case str():
            return VALUE_BYTES + len(value)
        case dict():
            return VALUE_BYTES + sum(len(name) + size_of(item) for name, item in value.items())
        case list():
            return VALUE_BYTES + sum(map(size_of, value))
    return VALUE_BYTES

"""The index of the encoder cache: where vision rows lie in a device buffer. Knows numbers, not tensors."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from saccade.errors import ConfigError

PADDING_PAGE = 0

# Salt, digest and number of rows. Tenants with different salts cannot learn of each other's images.
MediaKey = tuple[str | None, bytes, int]


@dataclass(eq=False, slots=True)
class Entry:
    """The rows of one image or video: row r lies at `pages[r // page_rows] * page_rows + r % page_rows`."""

    key: MediaKey
    num_rows: int
    pages: tuple[int, ...]
    num_holds: int = 0


class EncoderIndex:
    """Entries of vision rows, in pages of a buffer of `num_rows` rows, held by the requests that still read them.

    Invariant: page 0 takes the writes of padded rows; every other page is free or belongs to exactly one entry. An
    entry is held by at least one request, or idle. Idle entries can still be found; they are evicted, least recently
    used first, when their pages are needed, or at once without `keeps_idle`. A discarded entry can no longer be found,
    and frees its pages with its last hold.
    """

    def __init__(self, num_rows: int, page_rows: int, *, keeps_idle: bool = True) -> None:
        if page_rows < 1 or num_rows < 2 * page_rows:
            raise ConfigError(
                f"the encoder cache has {num_rows} rows in pages of {page_rows}; it needs at least 2 pages (one is for "
                "padding) of at least 1 row (--encoder-cache-tokens)"
            )
        self.page_rows = page_rows
        self._keeps_idle = keeps_idle
        self.num_pages = num_rows // page_rows
        self.max_rows = (self.num_pages - 1) * page_rows  # the longest entry that fits into an empty cache
        self.num_hits = 0
        self.num_misses = 0
        self._free = list(range(self.num_pages - 1, PADDING_PAGE, -1))
        self._entries: dict[MediaKey, Entry] = {}
        self._idle: OrderedDict[Entry, None] = OrderedDict()
        self._discarded: set[Entry] = set()

    @property
    def num_held_rows(self) -> int:
        """Rows in pages that cannot be evicted now."""
        return self.max_rows - self.page_rows * (len(self._free) + sum(len(entry.pages) for entry in self._idle))

    def hold(self, key: MediaKey) -> Entry | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        self.num_hits += 1
        self._idle.pop(entry, None)
        entry.num_holds += 1
        return entry

    def reserve(self, key: MediaKey, num_rows: int) -> Entry | None:
        """Make and hold an entry whose rows the caller will write. None, with nothing evicted, if there is no room."""
        assert key not in self._entries, f"{key} already has an entry"
        num_pages = -(-num_rows // self.page_rows)
        if num_pages > len(self._free) + sum(len(entry.pages) for entry in self._idle):
            return None
        while len(self._free) < num_pages:
            self._evict()
        entry = Entry(key, num_rows, tuple(self._free.pop() for _ in range(num_pages)), num_holds=1)
        self._entries[key] = entry
        self.num_misses += 1
        return entry

    def release(self, entry: Entry) -> None:
        assert entry.num_holds > 0, f"{entry} is released more often than held"
        entry.num_holds -= 1
        if entry.num_holds > 0:
            return
        if entry in self._discarded:
            self._discarded.remove(entry)
            self._free.extend(reversed(entry.pages))
            return
        self._idle[entry] = None
        if not self._keeps_idle:
            self.clear()

    def discard(self, entry: Entry) -> None:
        """Hide a held entry whose rows were not written, so that it is not found again."""
        assert entry.num_holds > 0, f"{entry} is not held"
        if entry not in self._discarded:
            del self._entries[entry.key]
            self._discarded.add(entry)

    def clear(self) -> None:
        """Evict all idle entries."""
        while self._idle:
            self._evict()

    def _evict(self) -> None:
        oldest, _ = self._idle.popitem(last=False)
        del self._entries[oldest.key]
        self._free.extend(reversed(oldest.pages))

    def check(self, held: Mapping[Entry, int] | None = None) -> None:
        """Assert the invariant, and that the holds match `held`."""
        entries = [*self._entries.values(), *self._discarded]
        pages = sorted(self._free + [page for entry in entries for page in entry.pages])
        assert pages == list(range(1, self.num_pages)), f"pages are lost, used twice, or padding was used: {pages}"
        assert all(key == entry.key for key, entry in self._entries.items()), "an entry is under another's key"
        idle = {entry for entry in entries if entry.num_holds == 0}
        assert idle == self._idle.keys(), "an idle entry cannot be evicted, or a held one can"
        assert all(len(e.pages) * self.page_rows >= e.num_rows for e in entries), "an entry lacks pages"
        if held is not None:
            counts = {entry: entry.num_holds for entry in entries if entry.num_holds}
            assert counts == dict(held), f"counted holds {counts}, held {dict(held)}"

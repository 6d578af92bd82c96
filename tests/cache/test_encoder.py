"""The index of the encoder cache."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from saccade.cache.encoder import EncoderIndex, Entry, MediaKey
from saccade.errors import ConfigError


def key(name: str, salt: str | None = None) -> MediaKey:
    return (salt, name.encode() * 16, 0)


def reserve(index: EncoderIndex, name: str, num_rows: int) -> Entry:
    entry = index.reserve(key(name), num_rows)
    assert entry is not None
    return entry


def test_an_entry_has_pages_for_its_rows_and_padding_has_its_own() -> None:
    index = EncoderIndex(40, 8)
    a, b = reserve(index, "a", 9), reserve(index, "b", 16)
    assert sorted(a.pages + b.pages) == [1, 2, 3, 4]
    assert index.max_rows == index.num_held_rows == 32
    assert index.reserve(key("c"), 1) is None


def test_a_released_entry_is_found_again_until_its_pages_are_needed() -> None:
    index = EncoderIndex(40, 8)
    a, b = reserve(index, "a", 16), reserve(index, "b", 8)
    index.release(a)
    index.release(b)
    assert index.hold(key("a")) is a
    index.release(a)  # b is now the least recently used
    reserve(index, "c", 16)
    assert index.hold(key("b")) is None
    assert index.hold(key("a")) is a
    assert (index.num_hits, index.num_misses) == (2, 3)


def test_an_entry_that_does_not_fit_evicts_nothing() -> None:
    index = EncoderIndex(40, 8)
    a = reserve(index, "a", 16)
    b = reserve(index, "b", 8)
    index.release(b)
    assert index.reserve(key("c"), 24) is None
    assert index.hold(key("b")) is b
    index.check({a: 1, b: 1})


def test_salts_do_not_share() -> None:
    index = EncoderIndex(40, 8)
    reserve(index, "a", 8)
    assert index.hold(key("a", "tenant")) is None
    assert index.hold(key("a", "")) is None


def test_a_discarded_entry_is_not_found_and_keeps_its_pages_while_held() -> None:
    index = EncoderIndex(40, 8)
    a = reserve(index, "a", 16)
    assert index.hold(key("a")) is a
    index.discard(a)
    index.discard(a)
    assert index.hold(key("a")) is None
    again = reserve(index, "a", 16)
    assert not set(a.pages) & set(again.pages)
    index.release(a)
    index.check({a: 1, again: 1})
    index.release(a)
    index.check({again: 1})
    assert index.num_held_rows == 16


def test_without_idle_entries_rows_are_shared_only_while_held() -> None:
    index = EncoderIndex(40, 8, keeps_idle=False)
    a = reserve(index, "a", 16)
    assert index.hold(key("a")) is a
    index.release(a)
    index.check({a: 1})
    assert index.num_held_rows == 16
    index.release(a)
    index.check({})
    assert index.num_held_rows == 0 and index.hold(key("a")) is None


def test_clear_evicts_entries_that_nobody_holds() -> None:
    index = EncoderIndex(40, 8)
    a, b = reserve(index, "a", 16), reserve(index, "b", 8)
    index.release(a)
    index.clear()
    index.check({b: 1})
    assert index.hold(key("a")) is None and index.hold(key("b")) is b


def test_misuse_is_caught() -> None:
    with pytest.raises(ConfigError, match="at least 2 pages"):
        EncoderIndex(15, 8)
    index = EncoderIndex(40, 8)
    a = reserve(index, "a", 8)
    with pytest.raises(AssertionError, match="already has an entry"):
        index.reserve(key("a"), 8)
    index.release(a)
    with pytest.raises(AssertionError, match="released more often"):
        index.release(a)
    with pytest.raises(AssertionError, match="not held"):
        index.discard(a)


class EncoderMachine(RuleBasedStateMachine):
    """Requests that hold entries, checked against a model of the rows in the buffer."""

    @initialize(pages=st.integers(2, 8), page_rows=st.integers(1, 4), keeps_idle=st.booleans())
    def start(self, pages: int, page_rows: int, keeps_idle: bool) -> None:
        self.index = EncoderIndex(pages * page_rows + page_rows // 2, page_rows, keeps_idle=keeps_idle)
        self.held: list[Entry] = []
        self.rows: dict[int, tuple[Entry, int]] = {}

    @rule(name=st.sampled_from("abcdef"), salt=st.sampled_from([None, "s"]))
    def want(self, name: str, salt: str | None) -> None:
        num_rows = 1 + 2 * (ord(name) - ord("a"))
        entry = self.index.hold(key(name, salt))
        if entry is None:
            free = self.index.max_rows // self.index.page_rows - sum(len(e.pages) for e in {*self.held})
            entry = self.index.reserve(key(name, salt), num_rows)
            assert (entry is not None) == (-(-num_rows // self.index.page_rows) <= free)
            if entry is None:
                return
            for row in range(num_rows):
                self.rows[self._place(entry, row)] = (entry, row)
        assert entry.key == key(name, salt)
        self.held.append(entry)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), is_failed=st.booleans())
    def release(self, data: st.DataObject, is_failed: bool) -> None:
        entry = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if is_failed:
            self.index.discard(entry)
        self.index.release(entry)

    @rule()
    def clear(self) -> None:
        self.index.clear()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "index"):
            self.index.check({entry: self.held.count(entry) for entry in self.held})
            for entry in self.held:
                for row in range(entry.num_rows):
                    assert self.rows[self._place(entry, row)] == (entry, row), "rows of a held entry were overwritten"

    def _place(self, entry: Entry, row: int) -> int:
        page_rows = self.index.page_rows
        return entry.pages[row // page_rows] * page_rows + row % page_rows


TestEncoder = EncoderMachine.TestCase
TestEncoder.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

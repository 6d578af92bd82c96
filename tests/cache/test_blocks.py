"""The block pool and the prefix cache: against a naive model, and rule by rule."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from saccade.cache.blocks import BlockPool
from saccade.cache.prefix import PrefixCache
from saccade.errors import ConfigError

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=10)


def test_the_padding_block_is_never_allocated() -> None:
    pool = BlockPool(5, 4)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0
    with pytest.raises(AssertionError, match="1 blocks wanted, 0 free"):
        pool.allocate(1)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 16), (0, 16), (8, 0)])
def test_a_pool_needs_a_block_besides_padding(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ConfigError, match="at least 2 blocks"):
        BlockPool(num_blocks, block_size)


def test_kept_blocks_are_reused_last_and_least_recently_used_first() -> None:
    pool, evicted = BlockPool(6, 4), list[int]()
    pool.on_evict = evicted.append
    a, b, c, d, e = pool.allocate(5)
    for block in (a, b, c):
        pool.keep(block)
    pool.release((a,))
    pool.release((b, c))  # frees c first: the end of a sequence is reused before its start
    pool.release((d, e))
    pool.share((a,))
    pool.release((a,))
    assert set(pool.allocate(2)) == {d, e}
    assert evicted == []
    assert pool.allocate(3) == (c, b, a)
    assert evicted == [c, b, a]
    pool.check(dict.fromkeys((a, b, c, d, e), 1))


def test_misuse_is_caught() -> None:
    pool = BlockPool(4, 4)
    (block,) = pool.allocate(1)
    pool.release((block,))
    with pytest.raises(AssertionError, match="released more often"):
        pool.release((block,))
    with pytest.raises(AssertionError, match="not kept"):
        pool.share((block,))
    with pytest.raises(AssertionError, match="not referenced"):
        pool.keep(block)
    with pytest.raises(AssertionError, match="owned"):
        pool.check({block: 1})


class PoolMachine(RuleBasedStateMachine):
    """Sequences that own blocks. The model knows the tokens up to the end of every block, and which block must be
    evicted next."""

    @initialize(num_blocks=st.integers(2, 9), size=st.integers(1, 3))
    def start(self, num_blocks: int, size: int) -> None:
        self.size = size
        self.pool = BlockPool(num_blocks, size)
        self.prefix = PrefixCache(self.pool, model=b"model")
        self.owners: list[tuple[tuple[int, ...], tuple[int, ...], str | None]] = []  # tokens, blocks, salt
        self.content: dict[int, tuple[str | None, tuple[int, ...]]] = {}
        self.cached: dict[tuple[str | None, tuple[int, ...]], int] = {}
        self.idle: list[int] = []

    @rule(tokens=TOKENS, salt=st.sampled_from([None, "", "a"]), is_known=st.booleans())
    def begin(self, tokens: list[int], salt: str | None, is_known: bool) -> None:
        """Look up a sequence, share the blocks found, allocate and write the rest, and insert full blocks."""
        keys = self._keys(tokens, salt)
        shared = self.prefix.match(keys, len(tokens) - 1)
        assert shared == self._expected(tokens, salt)
        needed = self.pool.blocks_for(len(tokens)) - len(shared)
        if needed > self.pool.num_free - sum(self.pool.is_free(block) for block in shared):
            return
        self.pool.share(shared)
        self.idle = [block for block in self.idle if block not in shared]
        blocks = shared + self._allocate(needed)
        for i, block in enumerate(blocks[len(shared) :], len(shared)):
            self.content[block] = (salt, tuple(tokens[: (i + 1) * self.size]))
        self.owners.append((tuple(tokens), blocks, salt))
        if is_known:
            self._insert(len(self.owners) - 1, keys)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.owners) - 1))
        self._insert(index, self._keys(self.owners[index][0], self.owners[index][2]))

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(self.owners))
        self.pool.share(owner[1])
        self.owners.append(owner)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        _, blocks, _ = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        self.pool.release(blocks)
        still = {block for owner in self.owners for block in owner[1]}
        self.idle += [b for b in reversed(blocks) if b not in still and b in self.cached.values()]

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "pool"):
            return
        owned: dict[int, int] = {}
        for _, blocks, _ in self.owners:
            for block in blocks:
                owned[block] = owned.get(block, 0) + 1
        self.pool.check(owned)
        self.prefix.check()
        assert len(self.prefix) == len(self.cached)
        assert self.pool.num_free + len(owned) == self.pool.num_blocks - 1

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for _, blocks, _ in self.owners:
                self.pool.release(blocks)
            assert self.pool.num_used == 0

    def _keys(self, tokens: list[int] | tuple[int, ...], salt: str | None) -> list[bytes]:
        keys: list[bytes] = []
        self.prefix.extend_keys(keys, tokens, (), salt)
        return keys

    def _expected(self, tokens: list[int], salt: str | None) -> tuple[int, ...]:
        found: list[int] = []
        while len(found) < (len(tokens) - 1) // self.size:
            block = self.cached.get((salt, tuple(tokens[: (len(found) + 1) * self.size])))
            if block is None:
                break
            assert self.content[block] == (salt, tuple(tokens[: (len(found) + 1) * self.size]))
            found.append(block)
        return tuple(found)

    def _allocate(self, count: int) -> tuple[int, ...]:
        num_blank = self.pool.num_free - len(self.idle)
        evicted = self.idle[: max(count - num_blank, 0)]
        self.idle = self.idle[len(evicted) :]
        blocks = self.pool.allocate(count)
        assert [block for block in blocks if block in self.cached.values()] == evicted
        self.cached = {key: block for key, block in self.cached.items() if block not in evicted}
        return blocks

    def _insert(self, index: int, keys: list[bytes]) -> None:
        tokens, blocks, salt = self.owners[index]
        for i, key in enumerate(keys):
            self.prefix.insert(key, blocks[i])
            self.cached.setdefault((salt, tokens[: (i + 1) * self.size]), blocks[i])


TestPool = PoolMachine.TestCase
TestPool.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_keys_are_wide_digests() -> None:
    prefix = PrefixCache(BlockPool(4, 2), model=b"m")
    keys: list[bytes] = []
    prefix.extend_keys(keys, [1, 2, 3, 4, 5], (), None)
    assert [len(key) for key in keys] == [32, 32]
    assert keys[0] != keys[1]

"""The pool of KV blocks: reference counts, and which block is allocated next. Knows numbers, not tensors."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from saccade.errors import ConfigError

PADDING_BLOCK = 0


class BlockPool:
    """Reference-counted blocks of `block_size` token slots.

    Invariant: block 0 takes the writes of padded rows and is never allocated. Every other block is either referenced
    (count >= 1) or free, so free + used == num_blocks - 1. A free block may be *kept*: its content can still be shared.
    Free blocks that are not kept are allocated first, then kept ones, least recently used first. `on_evict` is called
    with a kept block before its new owner gets it.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2 or block_size < 1:
            raise ConfigError(
                f"the KV cache has {num_blocks} blocks of {block_size} tokens; it needs at least 2 blocks (one is for "
                "padding) of at least 1 token (--gpu-memory-utilization, --block-size)"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_tokens = (num_blocks - 1) * block_size  # allocatable slots
        self.on_evict: Callable[[int], None] | None = None
        self._refs = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, PADDING_BLOCK, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # free and kept, least recently used first
        self.kept: set[int] = set()  # blocks whose content outlives their last reference

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._idle)

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def is_free(self, block: int) -> bool:
        return self._refs[block] == 0

    def allocate(self, count: int) -> tuple[int, ...]:
        """Blocks for a new owner. The caller must have checked `num_free`."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        taken = tuple(self._blank.pop() if self._blank else self._evict() for _ in range(count))
        for block in taken:
            self._refs[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block. Free blocks among them must be kept."""
        for block in blocks:
            if self._refs[block] == 0:
                assert block in self._idle, f"block {block} is free and its content is not kept"
                del self._idle[block]
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each block, last first: the end of a sequence is less likely to be shared again."""
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} is released more often than referenced"
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            if block in self.kept:
                self._idle[block] = None
            else:
                self._blank.append(block)

    def keep(self, block: int) -> None:
        """Let the content of a referenced block outlive its last reference, until it is evicted."""
        assert self._refs[block] > 0, f"block {block} is not referenced"
        self.kept.add(block)

    def forget(self) -> None:
        """Evict all kept blocks that are free."""
        while self._idle:
            self._blank.append(self._evict())

    def check(self, owned: Mapping[int, int] | None = None) -> None:
        """Assert the invariant, and that the reference counts equal `owned`."""
        blank, idle = set(self._blank), set(self._idle)
        used = {block for block, count in enumerate(self._refs) if count > 0}
        assert len(blank) == len(self._blank), f"a block is free twice: {sorted(self._blank)}"
        assert not (blank & idle), f"blocks {blank & idle} are free twice"
        assert not (used & (blank | idle)), f"blocks {used & (blank | idle)} are both free and referenced"
        assert used | blank | idle == set(range(1, self.num_blocks)), "a block is lost, or padding was handed out"
        assert len(used) == self.num_used, f"{len(used)} blocks used, {self.num_used} counted"
        assert min(self._refs) >= 0, "a negative count"
        assert idle <= self.kept, f"blocks {idle - self.kept} are queued for eviction but not kept"
        assert not (blank & self.kept), f"blocks {blank & self.kept} are kept but would be allocated first"
        if owned is not None:
            counts = {block: self._refs[block] for block in used}
            assert counts == dict(owned), f"counted references {counts}, owned {dict(owned)}"

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        self.kept.remove(block)
        if self.on_evict is not None:
            self.on_evict(block)
        return block

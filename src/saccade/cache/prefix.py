"""The prefix cache: finds blocks whose keys and values were computed for the same prefix of a sequence."""

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile

from saccade.cache.blocks import BlockPool

KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Span:
    """Rows `offset` to `offset + length` of a sequence are rows of an image or video, from its row `first_row` on.
    `digest` identifies pixels and settings. `layout` identifies whatever else affects keys and values of these rows,
    mainly rotary positions that do not follow from the digest (the time step of a video). The rows of an `is_whole`
    span attend to each other in both directions, so they must be computed in one chunk."""

    offset: int
    length: int
    digest: bytes
    media_idx: int = 0
    first_row: int = 0
    layout: bytes = b""
    is_whole: bool = False

    @property
    def end(self) -> int:
        return self.offset + self.length


class PrefixCache:
    """Full blocks by key, in a pool that keeps their content. A block's key digests the key before it, its tokens and
    its media rows; before the first comes a digest of model, block size and salt. Equal keys mean equal content: keys
    are never truncated, and every field has a fixed width or carries its length, so no two prefixes are encoded alike.

    Invariant: a key names one block, a block has at most one key, and exactly the blocks with a key are kept.
    """

    def __init__(self, pool: BlockPool, *, model: bytes) -> None:
        """`model` identifies everything that affects keys and values of all requests: weights, dtype, processor."""
        assert pool.on_evict is None, "the pool has a prefix cache already"
        pool.on_evict = self._forget
        self.pool = pool
        self._model = model
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def extend_keys(self, keys: list[bytes], tokens: Sequence[int], spans: Sequence[Span], salt: str | None) -> None:
        """Append keys for the full blocks of `tokens`, which continue where `keys` end. Spans are in order."""
        size = self.pool.block_size
        base = len(keys) * size
        parent = keys[-1] if keys else self._root(salt)
        for i in range(0, len(tokens) - size + 1, size):
            start = base + i
            hasher = blake2b(parent, digest_size=KEY_BYTES, person=b"saccade.block")
            hasher.update(array("q", tokens[i : i + size]).tobytes())
            for span in overlapping(spans, start, start + size):
                hasher.update(_describe(span, start, start + size))
            parent = hasher.digest()
            keys.append(parent)

    def match(self, keys: Sequence[bytes], max_tokens: int) -> tuple[int, ...]:
        """The blocks of the longest cached prefix of at most `max_tokens` tokens. The caller must share them."""
        run = takewhile(self._blocks.__contains__, keys[: max_tokens // self.pool.block_size])
        return tuple(self._blocks[key] for key in run)

    def insert(self, key: bytes, block: int) -> None:
        """Add a referenced block that is full and computed. If the key has a block, that one stays."""
        if key in self._blocks:
            return
        assert block not in self._keys, f"block {block} has another key"
        self.pool.keep(block)
        self._blocks[key] = block
        self._keys[block] = key

    def check(self) -> None:
        assert {key: block for block, key in self._keys.items()} == self._blocks, "keys and blocks disagree"
        odd = self.pool.kept ^ self._keys.keys()
        assert not odd, f"blocks {odd} are kept without a key, or the other way round"

    def _forget(self, block: int) -> None:
        del self._blocks[self._keys.pop(block)]

    def _root(self, salt: str | None) -> bytes:
        hasher = blake2b(digest_size=KEY_BYTES, person=b"saccade.root")
        hasher.update(array("q", [self.pool.block_size]).tobytes())
        hasher.update(_framed(self._model))
        hasher.update(b"\0" if salt is None else b"\1" + _framed(salt.encode("utf-8", "surrogatepass")))
        return hasher.digest()


def overlapping(spans: Sequence[Span], start: int, stop: int) -> Sequence[Span]:
    """Spans with rows from `start` to `stop`. `spans` must be in order and disjoint."""
    first = bisect_right(spans, start, key=lambda span: span.end)
    last = first
    while last < len(spans) and spans[last].offset < stop:
        last += 1
    return spans[first:last]


def _describe(span: Span, start: int, stop: int) -> bytes:
    """Encodes which rows of which media lie where in the block from `start` to `stop`."""
    begin, end = max(span.offset, start), min(span.end, stop)
    place = (begin - start, end - begin, span.first_row + begin - span.offset, span.length, int(span.is_whole))
    return array("q", place).tobytes() + _framed(span.digest) + _framed(span.layout)


def _framed(data: bytes) -> bytes:
    return array("q", [len(data)]).tobytes() + data

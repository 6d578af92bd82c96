"""Resources of running requests: KV blocks and encoder entries. The scheduler decides; this module keeps account."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from saccade.cache.blocks import BlockPool
from saccade.cache.encoder import EncoderIndex, Entry
from saccade.cache.prefix import PrefixCache
from saccade.scheduling.request import Request, Status


@dataclass(frozen=True, slots=True)
class DetachedResources:
    """Resources that a request no longer owns, kept until no plan in flight uses them."""

    blocks: tuple[int, ...]
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class UnfinishedMedia:
    """An image or video of a running request that is being encoded in parts, of which the first `num_planned` are
    planned. Its rows are not there yet, so it holds its entry itself."""

    request: Request
    media_idx: int
    entry: Entry
    num_parts: int
    num_planned: int = 0


class Resources:
    """Invariant: pool references and encoder holds are those of running requests, unreleased detached resources and the
    unfinished media item. There is at most one of those, because a pass that is not finished occupies its buffers."""

    def __init__(self, pool: BlockPool, encoder: EncoderIndex, prefix: PrefixCache | None) -> None:
        assert prefix is None or prefix.pool is pool, "the prefix cache is on another pool"
        self.pool, self.encoder, self.prefix = pool, encoder, prefix
        self.unfinished: UnfinishedMedia | None = None
        self.num_queried_tokens = self.num_hit_tokens = 0  # of requests that started, and found computed

    def shareable(self, request: Request, spare: int) -> tuple[int, ...] | None:
        """Returns the computed blocks that a starting request can share, or None if its known tokens do not fit with
        `spare` blocks left for running requests."""
        max_tokens = request.num_reusable
        found: tuple[int, ...] = ()
        if self.prefix is not None:
            self._extend_keys(self.prefix, request)
            found = self.prefix.match(request.keys, max_tokens)
        parent = request.parent
        if parent is not None and parent.num_computed >= len(parent.prompt_ids):  # while it runs, it owns their blocks
            count = min(max_tokens, len(parent.prompt_ids)) // self.pool.block_size
            found = max(found, parent.blocks[:count], key=len)
        revived = sum(self.pool.is_free(block) for block in found)
        needed = self.pool.blocks_for(request.num_tokens) - len(found)
        return found if needed + revived + spare <= self.pool.num_free else None

    def start(self, request: Request, shared: tuple[int, ...]) -> None:
        """Allocates blocks for all known tokens, so that a started prompt never waits for blocks."""
        self.pool.share(shared)
        request.blocks = shared + self.pool.allocate(self.pool.blocks_for(request.num_tokens) - len(shared))
        request.num_computed = request.num_planned = len(shared) * self.pool.block_size
        request.num_inserted = len(shared)
        if request.num_preemptions:
            return  # finding its own blocks again does not count as a cache hit
        request.num_cached_tokens = request.num_computed
        if self.prefix is not None:
            self.num_queried_tokens += request.num_tokens
            self.num_hit_tokens += request.num_computed

    def grow(self, request: Request) -> bool:
        """Makes sure that the next row has a slot. Returns False if no block is left."""
        if request.num_planned < len(request.blocks) * self.pool.block_size:
            return True
        if self.pool.num_free == 0:
            return False
        request.blocks += self.pool.allocate(1)
        return True

    def advance(self, request: Request) -> None:
        """After `num_computed` has grown: shares blocks that are full, and releases media that is not read again."""
        for media_idx in [i for i in request.entries if request.media_ends[i] <= request.num_computed]:
            self.encoder.release(request.entries.pop(media_idx))
        if self.prefix is None:
            return
        num_full = request.num_computed // self.pool.block_size
        if request.num_inserted < num_full:
            self._extend_keys(self.prefix, request)
            for i in range(request.num_inserted, num_full):
                self.prefix.insert(request.keys[i], request.blocks[i])
            request.num_inserted = num_full

    def detach(self, request: Request) -> DetachedResources:
        if self.unfinished is not None and self.unfinished.request is request:
            # Free at once: nobody reads the rows, and what a video's first passes write comes before the next owner.
            self.encoder.discard(self.unfinished.entry)
            self.encoder.release(self.unfinished.entry)
            self.unfinished = None
        held = DetachedResources(request.blocks, tuple(request.entries.values()))
        request.blocks, request.entries = (), {}
        return held

    def release(self, held: DetachedResources) -> None:
        self.pool.release(held.blocks)
        for entry in held.entries:
            self.encoder.release(entry)

    def check(self, running: Iterable[Request], detached: Iterable[DetachedResources]) -> None:
        owners = [*(DetachedResources(one.blocks, tuple(one.entries.values())) for one in running), *detached]
        if self.unfinished is not None:
            one = self.unfinished
            assert one.request.status is Status.RUNNING and 0 < one.num_planned < one.num_parts, f"stray {one}"
            owners.append(DetachedResources((), (one.entry,)))
        self.pool.check(Counter(block for held in owners for block in held.blocks))
        self.encoder.check(Counter(entry for held in owners for entry in held.entries))
        if self.prefix is not None:
            self.prefix.check()

    def _extend_keys(self, prefix: PrefixCache, request: Request) -> None:
        known, size = len(request.keys) * self.pool.block_size, self.pool.block_size
        if request.num_tokens >= known + size:
            prefix.extend_keys(request.keys, request.tokens_from(known), request.key_spans, request.cache_salt)

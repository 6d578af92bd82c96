"""The shape of a phase: the dimensions of its batches, and which bucket holds a batch."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from saccade.choice.key import Capacity

MAX_CACHED_SIZES = 4096  # batch sizes recur, so their buckets are cached


@dataclass(frozen=True, slots=True)
class Boundary:
    """An input whose values cut dimension `rows` into segments; dimension `count` is their number. No segment has more
    than `longest` rows; `longest=0` means no limit."""

    name: str
    rows: str
    count: str
    longest: int = 0


def misfit(sizes: Mapping[str, int], room: Mapping[str, int], boundaries: Sequence[Boundary]) -> str | None:
    """Why a batch of these sizes does not fit a capacity; None if it does."""
    needed = dict(sizes)
    for boundary in boundaries:
        num_padded = room[boundary.rows] - sizes[boundary.rows]
        if num_padded > 0:  # padded rows need their own segments
            needed[boundary.count] += -(-num_padded // boundary.longest) if boundary.longest else 1
    for name, size in needed.items():
        if size > room[name]:
            return f"{name}: {size} > {room[name]}"
    return None


@dataclass(frozen=True, kw_only=True)
class PhaseShape:
    """Buckets are ordered by dimension `rows`, and padding is counted in it. `limits` are the sizes of the buffers."""

    name: str
    rows: str
    buckets: tuple[Capacity, ...]
    limits: Capacity
    boundaries: tuple[Boundary, ...] = ()

    @cached_property
    def ordered(self) -> tuple[Capacity, ...]:
        """The buckets, smallest first."""
        return tuple(sorted(self.buckets, key=lambda bucket: (bucket[self.rows], sum(bucket.values()))))

    @cached_property
    def bucket_for(self) -> Callable[[Capacity], Capacity | None]:
        """The smallest bucket that holds a batch of these sizes, if any does."""
        return lru_cache(MAX_CACHED_SIZES)(lambda sizes: self.bucket_for_all([sizes]))

    def bucket_for_all(self, batches: Sequence[Capacity]) -> Capacity | None:
        """The smallest bucket that holds each of several batches, if any does."""
        rows = [bucket[self.rows] for bucket in self.ordered]
        for bucket in self.ordered[bisect_left(rows, max(sizes[self.rows] for sizes in batches)) :]:
            if all(misfit(sizes, bucket, self.boundaries) is None for sizes in batches):
                return bucket
        return None

    def misfit_in_largest(self, sizes: Capacity) -> str:
        return misfit(sizes, self.ordered[-1], self.boundaries) or ""

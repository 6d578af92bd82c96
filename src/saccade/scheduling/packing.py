"""Packs images and frames into vision passes so that all passes together take the least time. Pure.

Padding to a bucket wastes time, and so do passes too small to fill the device; the caller supplies the measured cost of
a pass. If each rank holds the whole tower, ranks run each pass together in one bucket, so the largest share counts.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

Cost = Callable[[int], float]

MAX_COMPARED = 64  # parts that the best cut is searched for at once; more are packed in batches
PASS_UNITS = 96  # fixed cost of a pass, in rows: about 0.9 ms on an H200, at 0.01 ms per row


def default_cost(rows: int) -> float:
    return rows + PASS_UNITS


@dataclass(frozen=True, slots=True)
class MediaPart:
    """Frames `first` to `first + count` of an item, each of `units` rows. It is not divided further."""

    item: int
    first: int
    count: int
    units: int

    @property
    def rows(self) -> int:
        return self.count * self.units


Shares = list[list[MediaPart]]  # each rank's parts of a joint pass; may be empty


@dataclass(frozen=True)
class Bins:
    """Buckets of the vision phase: rows, and frames (one of them for padding)."""

    rows: tuple[int, ...]
    frames: tuple[int, ...]

    @cached_property
    def largest(self) -> int:
        return self.rows[-1]

    @cached_property
    def max_frames(self) -> int:
        return self.frames[-1] - 1  # one segment is for padding

    def rows_for(self, rows: int, frames: int) -> int | None:
        return self.rows_for_all([(rows, frames)])

    def rows_for_all(self, passes: Sequence[tuple[int, int]]) -> int | None:
        """Rows of the smallest bucket that holds each of these passes, given as (rows, frames); None if none does."""
        for i in range(bisect_left(self.rows, max(rows for rows, _ in passes)), len(self.rows)):
            if all(frames + (self.rows[i] > rows) <= self.frames[i] for rows, frames in passes):
                return self.rows[i]
        return None


def split(item: int, num_frames: int, units: int, bins: Bins, num_ranks: int = 1) -> list[MediaPart]:
    """Divides an item into parts that fit a pass. Frames do not attend to each other, so a long video can take several
    passes or ranks. A frame that no bucket holds becomes a part by itself."""
    size = max(1, min(bins.max_frames, bins.largest // max(units, 1), -(-num_frames // num_ranks)))
    return [MediaPart(item, first, min(size, num_frames - first), units) for first in range(0, num_frames, size)]


def pack(parts: Sequence[MediaPart], bins: Bins, cost: Cost = default_cost) -> list[list[MediaPart]]:
    """Packs all parts into passes at the lowest cost found. Tries two ways: the best cut of the parts sorted by size,
    and filling one pass after another as far as possible. A part that no bucket holds gets a pass by itself."""
    if len(parts) == 1:
        return [list(parts)]
    fitting = [part for part in parts if bins.rows_for(part.rows, part.count) is not None]
    alone = [[part] for part in parts if bins.rows_for(part.rows, part.count) is None]
    fitting.sort(key=lambda part: -part.rows)
    if len(fitting) == 1:
        return [fitting, *alone]
    found: list[list[MediaPart]] = []
    for start in range(0, len(fitting), MAX_COMPARED):
        stretch = fitting[start : start + MAX_COMPARED]
        cut, filled = _neighbours(stretch, bins, cost), _filled(stretch, bins)
        found += cut if _total(cut, bins, cost) <= _total(filled, bins, cost) else filled
    return _joined(found, bins, cost) + alone


def padded_rows(passes: Sequence[Sequence[MediaPart]], bins: Bins) -> int:
    """Rows of all passes, padding included. A pass that no bucket holds is not padded."""
    return sum(_bucket(parts, bins) or sum(part.rows for part in parts) for parts in passes)


def share_out(parts: Sequence[MediaPart], bins: Bins, num_ranks: int, cost: Cost = default_cost) -> list[Shares]:
    """Shares all parts out among ranks: in one pass, or in as many as the fullest rank needs if that costs less. A part
    that no bucket holds gets a pass by itself."""
    fitting, alone = list[MediaPart](), list[Shares]()
    for part in parts:
        if bins.rows_for(part.rows, part.count) is None:
            alone.append([[part], *([] for _ in range(num_ranks - 1))])
        else:
            fitting.append(part)
    if not fitting:
        return alone
    shares = balanced(fitting, num_ranks)
    in_turn = in_step([pack(share, bins, cost) for share in shares])

    def total(passes: list[Shares]) -> float:
        buckets = [bucket_of(shares, bins) for shares in passes]
        return sum(float("inf") if bucket is None else cost(bucket) for bucket in buckets)

    return min(in_turn, [shares], key=total) + alone


def balanced(parts: Sequence[MediaPart], num_ranks: int) -> Shares:
    """Largest part first, each to the rank with the fewest rows. The largest share is at most 4/3 of the optimum."""
    shares: Shares = [[] for _ in range(num_ranks)]
    rows = [0] * num_ranks
    for part in sorted(parts, key=lambda part: -part.rows):
        rank = rows.index(min(rows))
        shares[rank].append(part)
        rows[rank] += part.rows
    return shares


def in_step(passes: Sequence[Sequence[list[MediaPart]]]) -> list[Shares]:
    """Aligns the ranks' passes by size, largest first. Ranks with fewer passes get empty ones."""
    ordered = [sorted(one, key=lambda parts: -_size(parts)[0]) for one in passes]
    return [list(shares) for shares in zip_longest(*ordered, fillvalue=[])]


def bucket_of(shares: Shares, bins: Bins) -> int | None:
    return bins.rows_for_all([_size(share) for share in shares])


def _neighbours(parts: Sequence[MediaPart], bins: Bins, cost: Cost) -> list[list[MediaPart]]:
    """The cheapest cut of a sequence into passes. best[i] is the cost of the first i parts."""
    best, cuts = [0.0], [0]
    for end in range(1, len(parts) + 1):
        options = []
        rows = frames = 0
        for start in range(end - 1, -1, -1):
            rows, frames = rows + parts[start].rows, frames + parts[start].count
            bucket = bins.rows_for(rows, frames)
            if bucket is None:
                break
            options.append((best[start] + cost(bucket), start))
        least, start = min(options)
        best.append(least)
        cuts.append(start)
    passes, end = [], len(parts)
    while end:
        passes.append(list(parts[cuts[end] : end]))
        end = cuts[end]
    return passes[::-1]


def _filled(parts: Sequence[MediaPart], bins: Bins) -> list[list[MediaPart]]:
    """Fills one pass after another as close to the largest bucket as any subset of the remaining parts comes."""
    left, passes = list(parts), []
    while left:
        chosen = _fullest(left, bins)
        passes.append(chosen)
        taken = set(map(id, chosen))
        left = [part for part in left if id(part) not in taken]
    return passes


def _fullest(parts: Sequence[MediaPart], bins: Bins) -> list[MediaPart]:
    """The fullest subset that fits one pass. Reachable sums are bits of a number; excess frames are left for later."""
    reachable = [1]
    mask = (1 << (bins.largest + 1)) - 1
    for part in parts:
        reachable.append((reachable[-1] | (reachable[-1] << part.rows)) & mask)
    total = reachable[-1].bit_length() - 1
    chosen: list[MediaPart] = []
    for i in range(len(parts) - 1, -1, -1):
        if not reachable[i] >> total & 1:
            chosen.append(parts[i])
            total -= parts[i].rows
    while len(chosen) > 1 and _bucket(chosen, bins) is None:
        chosen.pop()
    return chosen


def _joined(passes: list[list[MediaPart]], bins: Bins, cost: Cost) -> list[list[MediaPart]]:
    """Joins neighbouring passes if that is cheaper."""
    found: list[list[MediaPart]] = []
    for parts in passes:
        if found:
            both = found[-1] + parts
            bucket = _bucket(both, bins)
            if bucket is not None and cost(bucket) < _total([found[-1], parts], bins, cost):
                found[-1] = both
                continue
        found.append(parts)
    return found


def _total(passes: Sequence[Sequence[MediaPart]], bins: Bins, cost: Cost) -> float:
    return sum(cost(_bucket(parts, bins) or bins.largest) for parts in passes)


def _bucket(parts: Sequence[MediaPart], bins: Bins) -> int | None:
    return bins.rows_for(*_size(parts))


def _size(parts: Sequence[MediaPart]) -> tuple[int, int]:
    return sum(part.rows for part in parts), sum(part.count for part in parts)

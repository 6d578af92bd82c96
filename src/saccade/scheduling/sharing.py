"""Which rank encodes which images, where every rank holds the whole vision tower. Pure.

Ranks run their passes at the same time and in the same bucket, so what counts is the largest share.
"""

from collections.abc import Sequence
from itertools import zip_longest

from saccade.scheduling.packing import Bins, Cost, MediaPart, default_cost, pack

Shares = list[list[MediaPart]]  # the parts of each rank in a pass that all make together; some may have none


def share_out(parts: Sequence[MediaPart], bins: Bins, num_ranks: int, cost: Cost = default_cost) -> list[Shares]:
    """Passes that together hold all parts: all in one, or as many as the fullest rank takes if that costs less. A part
    that no bucket holds has a pass to itself."""
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
    return min(in_turn, [shares], key=lambda passes: _total(passes, bins, cost)) + alone


def balanced(parts: Sequence[MediaPart], num_ranks: int) -> Shares:
    """The longest part first, each to the rank that has fewest rows: the largest share is at most a third larger than
    it must be."""
    shares: Shares = [[] for _ in range(num_ranks)]
    rows = [0] * num_ranks
    for part in sorted(parts, key=lambda part: -part.rows):
        rank = rows.index(min(rows))
        shares[rank].append(part)
        rows[rank] += part.rows
    return shares


def in_step(passes: Sequence[Sequence[list[MediaPart]]]) -> list[Shares]:
    """The passes of each rank, the largest of all ranks at the same time; a rank that has fewer gets empty ones."""
    ordered = [sorted(one, key=_rows, reverse=True) for one in passes]
    return [list(shares) for shares in zip_longest(*ordered, fillvalue=[])]


def bucket_of(shares: Shares, bins: Bins) -> int | None:
    """Rows of the smallest bucket that holds every share."""
    sizes = [(_rows(share), sum(part.count for part in share)) for share in shares]
    return bins.rows_for_all(sizes)


def _rows(parts: Sequence[MediaPart]) -> int:
    return sum(part.rows for part in parts)


def _total(passes: Sequence[Shares], bins: Bins, cost: Cost) -> float:
    buckets = [bucket_of(shares, bins) for shares in passes]
    return sum(float("inf") if bucket is None else cost(bucket) for bucket in buckets)

"""Which buckets a CPU captures: there a graph is for being right, not for being fast."""

from collections.abc import Sequence

from saccade.graphs import Capacity, thinned

STRIDE = 4  # of the buckets that a GPU captures
COARSE_ROWS = 256  # from here on, buckets lie so far apart that all of them together take about twice the largest
COARSE_STEP = 0.6


def few_buckets(buckets: Sequence[Capacity], rows: str) -> tuple[Capacity, ...]:
    """Some of a phase's buckets, the largest and the smallest among them: every batch that had a graph still has one.
    Empty requests cost a CPU nothing, so that of buckets with as many rows the roomiest is enough."""
    by_rows = {bucket[rows]: bucket for bucket in sorted(buckets, key=lambda b: (b[rows], sum(b.values())))}
    kept: list[Capacity] = []
    for bucket in reversed(thinned(list(by_rows.values()), STRIDE)):
        if not kept or bucket[rows] <= max(COARSE_ROWS, COARSE_STEP * kept[-1][rows]):
            kept.append(bucket)
    return tuple(reversed(kept))

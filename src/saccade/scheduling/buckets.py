"""Which sizes get a graph in each phase: few enough to capture in seconds, dense enough to waste little on padding."""

from collections.abc import Sequence

from saccade.choice.key import Capacity
from saccade.models.model_spec import VisionSpec

FEW_ROWS = 128  # steps of up to this many rows are bound by reading weights, so padding is free
FEW_ROWS_STEP = 16
WIDE_ROWS, WIDE_STEP, WIDEST_STEP = 6144, 128, 256  # distance between buckets up to WIDE_ROWS, and above
MANY_ROWS, MANY_ROWS_STEP = 2048, 512
FEW_REQUESTS = 32  # enough for most prefills; attention over hundreds of empty requests costs 3 % at 8192 rows

MAX_FRAMES = 64  # images and frames per pass
# Attention also visits empty segments, so a bucket has room only for a likely number of frames: frames of 24 rows or
# more (a 224x224 image has 49). Batches of smaller frames take a larger bucket.
UNITS_PER_FRAME = 24
MIN_FRAMES = 4
PART_UNITS = 1024  # at least, in each part of a vision pass that may stop and go on later
UNITS_PER_WINDOW = 4  # on average; a batch of smaller windows may have too many for its bucket

# On a CPU graphs are for correctness, not speed.
STRIDE = 4  # keep every fourth of the GPU's buckets
COARSE_ROWS = 256  # above this, buckets are so far apart that their rows add up to about twice the largest
COARSE_STEP = 0.6


def prefill_buckets(max_tokens: int, max_requests: int) -> tuple[Capacity, ...]:
    """Every row count with room for few requests. Every second one up to 2,048 rows, and multiples of 512 above, also
    with room for all: a step of many rows and many requests has prompts waiting, which fill it to the last row."""
    rows = prefill_rows(max_tokens)
    roomy = {*[n for n in rows if n <= MANY_ROWS][::-2], *(n for n in rows if n % MANY_ROWS_STEP == 0), rows[-1]}
    pairs = [(n, count) for n in rows for count in (FEW_REQUESTS, max_requests) if count == FEW_REQUESTS or n in roomy]
    return tuple(dict.fromkeys(Capacity.of(tokens=n, requests=min(count, n + 1, max_requests)) for n, count in pairs))


def prefill_rows(largest: int) -> tuple[int, ...]:
    """Buckets are 6 to 12 % apart up to 2,048 rows, then 128 rows, and 256 from 6,144 on. Most steps of a busy server
    have a few thousand rows, where one percent of padding is milliseconds."""
    few = range(FEW_ROWS_STEP, FEW_ROWS, FEW_ROWS_STEP)
    steps = row_buckets(largest, smallest=FEW_ROWS)
    wide = range(MANY_ROWS, min(largest, WIDE_ROWS), WIDE_STEP)
    widest = range(WIDE_ROWS, largest, WIDEST_STEP)
    return tuple(sorted(n for n in {*few, *steps, *wide, *widest} if n <= largest))


def decode_buckets(largest: int) -> tuple[int, ...]:
    """Every batch size up to 8, then four per octave: padded requests have no keys, and a few extra rows cost little
    while the step is bound by reading weights."""
    return tuple(sorted({*range(1, min(8, largest) + 1), *row_buckets(largest, smallest=8, per_octave=4)}))


def head_buckets(largest: int) -> tuple[int, ...]:
    """Powers of two: heads and samplers are bound by weights and vocabulary size, so extra rows are free."""
    return row_buckets(largest, smallest=1, per_octave=1)


def vision_buckets(max_units: int) -> tuple[int, ...]:
    """A quarter octave apart up to 256 rows, where passes are short, and an eighth above, where padding costs
    milliseconds. All are 1/48 above round numbers: images of 49, 196, 324 and 784 rows (224, 448, 560 and 896 pixels a
    side with patches of 16) are just above round ones, and the next round bucket would pad them by 9 %."""
    fine, coarse = (row_buckets(max_units, smallest=32, per_octave=n) for n in (8, 4))
    chosen = [n for n in coarse if n <= 256] + [n for n in fine if n > 256]
    return tuple(sorted({min(round(n * 49 / 48), max_units) for n in chosen} | {max_units}))


def vision_capacity(spec: VisionSpec, units: int, *, has_shares: bool = False) -> Capacity:
    """With `has_shares` ranks encode their own images, and `share` is the rows of the largest share."""
    frames = min(MAX_FRAMES, max(MIN_FRAMES, units // UNITS_PER_FRAME), units)
    sizes = {"units": units, "patches": units * spec.unit, "frames": frames + 1}
    if spec.window:
        sizes["windows"] = units // UNITS_PER_WINDOW + MAX_FRAMES
    if has_shares:
        sizes["share"] = units
    return Capacity.of(sizes)


def vision_parts(units: int, depth: int, part_units: int = PART_UNITS) -> int:
    """How many parts a pass of so many rows has. Each has at least one block of the tower."""
    return max(1, min(units // part_units, depth))


def longest_window(spec: VisionSpec) -> int:
    return spec.window * spec.window * spec.unit


def few_buckets(buckets: Sequence[Capacity], rows: str) -> tuple[Capacity, ...]:
    """Keeps some of a phase's buckets, the largest and the smallest among them, so every batch that had a graph still
    has one. Empty requests cost a CPU nothing, so the roomiest bucket of each row count is enough."""
    by_rows = {bucket[rows]: bucket for bucket in sorted(buckets, key=lambda b: (b[rows], sum(b.values())))}
    kept: list[Capacity] = []
    for bucket in reversed(_thinned(list(by_rows.values()), STRIDE)):
        if not kept or bucket[rows] <= max(COARSE_ROWS, COARSE_STEP * kept[-1][rows]):
            kept.append(bucket)
    return tuple(reversed(kept))


def row_buckets(largest: int, *, smallest: int = 16, per_octave: int = 8) -> tuple[int, ...]:
    """Row counts from `smallest` to `largest`, with `per_octave` equal steps from one power of two to the next. With 8,
    a step is 1/16 to 1/8 of the size and padding averages half a step: about 4 % of uniformly distributed sizes."""
    buckets = [min(smallest, largest)]
    while buckets[-1] < largest:
        octave = 1 << (buckets[-1].bit_length() - 1)
        step = max(octave // per_octave, 1)
        buckets.append(min(buckets[-1] // step * step + step, largest))
    return tuple(buckets)


def _thinned(buckets: Sequence[Capacity], stride: int) -> tuple[Capacity, ...]:
    """Every `stride`-th bucket, counted from the largest, and the smallest. `buckets` are sorted by size."""
    return tuple(sorted({*buckets[::-1][::stride], *buckets[:1]}, key=buckets.index))

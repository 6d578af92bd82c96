# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: PLR0913
"""Device code of `saccade.kernels.fused_sampling`: the smallest logit that min-p, top-k and top-p keep, without a sort.

One program searches one row, given the peak and mass of each tile. It reads a tile only if its peak reaches a lower
bound of the threshold: the k-th largest peak bounds the k-th largest logit, and peaks and masses together give a bound
for top-p. In a flat distribution it reads all tiles. The search is always exact.

The search runs over "keys": integers that sort like the floats. Sums run in a fixed order that depends on the
vocabulary but not on the batch, so a row's token does not depend on other rows.
"""

import triton
import triton.language as tl

NO_KEY = tl.constexpr(-(2**31))  # below the key of -inf
_KEY_OF_MINUS_INF = tl.constexpr(-0x7F800001)
_NUM_PIVOTS = tl.constexpr(8)
_UNROLL = tl.constexpr(4)  # groups of tiles whose loads are in flight together


@triton.jit
def key_of_min_p(min_p, peak, temperature):
    """The key of the smallest logit that is at least min_p times as likely as the peak, or of -inf without min-p."""
    low = tl.full([], _KEY_OF_MINUS_INF, tl.int64)
    if min_p > 0:
        least = key_of(tl.minimum(peak + temperature * tl.log(min_p), peak))
        low = tl.maximum(low, least.to(tl.int64))
    return low


@triton.jit
def key_of_top_k(
    logits_ptr,
    hits_ptr,
    vocabulary,
    keys,
    k,
    low,
    peak,
    inverse,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The key of the k-th largest logit, or low if that is larger."""
    high = key_of(peak).to(tl.int64) + 1
    low = _kth_peak(keys, k, low, high)
    num_hits = list_hits(hits_ptr, keys, low, TILES)
    return _narrow(logits_ptr, hits_ptr, num_hits, vocabulary, k, low, high, peak, inverse, False, TILE, GROUP)


@triton.jit
def key_of_top_p(
    logits_ptr,
    hits_ptr,
    vocabulary,
    keys,
    peaks,
    masses,
    top_p,
    is_cut,
    low,
    peak,
    inverse,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The largest key with at least the share top_p of the row's mass at or above it. Only mass at or above low counts.
    Unless another filter has cut the row (is_cut), that is the sum over all tiles."""
    high = key_of(peak).to(tl.int64) + 1
    weights = tl.where(peaks == float("-inf"), 0.0, tl.exp((peaks - peak) * inverse))
    masses *= weights
    whole = tl.sum(masses, axis=0)
    if is_cut:
        num_hits = list_hits(hits_ptr, keys, low, TILES)
        pivots = tl.zeros([_NUM_PIVOTS], tl.int32) + low.to(tl.int32)
        sums = _above(logits_ptr, hits_ptr, num_hits, vocabulary, pivots, peak, inverse, True, TILE, GROUP)
        whole = tl.max(sums, axis=0)
    target = tl.maximum(top_p * whole, 1e-30)
    low = _bound_by_mass(keys, weights, masses, target, low, high, peak, inverse, TILE)
    num_hits = list_hits(hits_ptr, keys, low, TILES)
    return _narrow(logits_ptr, hits_ptr, num_hits, vocabulary, target, low, high, peak, inverse, True, TILE, GROUP)


@triton.jit
def list_hits(hits_ptr, keys, low, TILES: tl.constexpr):
    """Writes the tiles whose peak reaches low, in ascending order, and returns their number."""
    is_hit = (keys >= low.to(tl.int32)).to(tl.int32)
    # Other threads may still be reading the previous list, and all read this one next.
    tl.debug_barrier()
    tl.store(hits_ptr + tl.cumsum(is_hit, axis=0) - 1, tl.arange(0, TILES), mask=is_hit != 0)
    tl.debug_barrier()
    return tl.sum(is_hit, axis=0)


@triton.jit
def load_hits(logits_ptr, hits_ptr, first, num_hits, vocabulary, TILE: tl.constexpr, GROUP: tl.constexpr):
    """The logits of the listed tiles first ... first + GROUP - 1, and their columns."""
    hits = first + tl.arange(0, TILE * GROUP) // TILE
    tiles = tl.load(hits_ptr + hits, mask=hits < num_hits, other=0)
    columns = tiles * TILE + tl.arange(0, TILE * GROUP) % TILE
    inside = (hits < num_hits) & (columns < vocabulary)
    return cleaned(tl.load(logits_ptr + columns, mask=inside, other=float("-inf"))), columns


@triton.jit
def _kth_peak(keys, k, low, high):
    """The largest key that at least k tiles reach, or low. It is a lower bound of the key of the k-th largest logit."""
    while high - low > 1:
        middle = low + (high - low) // 2
        is_enough = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), axis=0) >= k
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
    return low


@triton.jit
def _bound_by_mass(keys, weights, masses, target, low, high, peak, inverse, TILE: tl.constexpr):
    """The largest key that provably has enough mass at or above it, or low. If a tile's peak reaches a value, the
    tile's mass at or above it is at least the peak's weight, and at least the tile's mass minus the weight of TILE - 1
    logits just below the value. The margin covers rounding."""
    target *= 1.00001
    while high - low > 1:
        middle = low + (high - low) // 2
        weight = tl.exp((value_of(middle.to(tl.int32)) - peak) * inverse)
        sure = tl.maximum(weights, masses - (TILE - 1) * weight)
        is_enough = tl.sum(tl.where(keys >= middle.to(tl.int32), sure, 0.0), axis=0) >= target
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
    return low


@triton.jit
def _narrow(
    logits_ptr,
    hits_ptr,
    num_hits,
    vocabulary,
    target,
    low,
    high,
    peak,
    inverse,
    WEIGHS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The largest key in [low, high) with at least `target` at or above it; low satisfies this, high does not. Each
    pass cuts the interval into nine. The listed tiles must hold every logit at or above low."""
    while high - low > 1:
        step = (high - low + _NUM_PIVOTS) // (_NUM_PIVOTS + 1)
        pivots = tl.minimum(low + step * (1 + tl.arange(0, _NUM_PIVOTS)), high).to(tl.int32)
        totals = _above(logits_ptr, hits_ptr, num_hits, vocabulary, pivots, peak, inverse, WEIGHS, TILE, GROUP)
        num_enough = tl.sum((totals >= target).to(tl.int32), axis=0)
        high = tl.minimum(high, low + step * (num_enough + 1))
        low += step * num_enough
    return low


@triton.jit
def _above(
    logits_ptr,
    hits_ptr,
    num_hits,
    vocabulary,
    pivots,
    peak,
    inverse,
    WEIGHS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """For each pivot, the number of logits in the listed tiles at or above it, or with WEIGHS their mass."""
    totals = tl.zeros([_NUM_PIVOTS, TILE * GROUP], dtype=tl.float32)
    even = num_hits // (_UNROLL * GROUP) * (_UNROLL * GROUP)
    for first in range(0, even, _UNROLL * GROUP):
        for part in tl.static_range(_UNROLL):
            group = first + part * GROUP
            totals += _tally(
                logits_ptr, hits_ptr, group, num_hits, vocabulary, pivots, peak, inverse, WEIGHS, TILE, GROUP
            )  # fmt: skip
    for group in range(even, num_hits, GROUP):
        totals += _tally(logits_ptr, hits_ptr, group, num_hits, vocabulary, pivots, peak, inverse, WEIGHS, TILE, GROUP)
    return tl.sum(totals, axis=1)


@triton.jit
def _tally(
    logits_ptr,
    hits_ptr,
    first,
    num_hits,
    vocabulary,
    pivots,
    peak,
    inverse,
    WEIGHS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    x, _ = load_hits(logits_ptr, hits_ptr, first, num_hits, vocabulary, TILE, GROUP)
    weights = tl.exp((x - peak) * inverse) if WEIGHS else tl.full([TILE * GROUP], 1.0, tl.float32)
    return tl.where(key_of(x)[None, :] >= pivots[:, None], weights[None, :], 0.0)


@triton.jit
def cleaned(x):
    """Replaces NaN by -inf, and +inf by the largest float, so that differences from a peak are not NaN."""
    return tl.where(x == x, tl.minimum(x, 3.4028234663852886e38), float("-inf"))


@triton.jit
def key_of(x):
    """An integer that sorts like x; both zeros have the same key."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def value_of(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: PLR0913
"""Device code of `saccade.kernels.fused_sampling`: greedy choice, and sampling with min-p, top-k and top-p.

A row is cut into chunks, with one program each so that even few rows fill a GPU, and chunks into tiles of 128 tokens.
The first launch reads every logit once. It writes each chunk's best score, or for rows with filters each tile's peak
and mass. The second launch has one program per row. It picks the best chunk, or finds the floor (see `triton_floor`)
and draws from the few tiles that reach it.
"""

import triton
import triton.language as tl

from saccade.kernels import reference_sampling
from saccade.kernels.launch import Launcher
from saccade.kernels.triton_floor import (
    NO_KEY,
    cleaned,
    key_of,
    key_of_min_p,
    key_of_top_k,
    key_of_top_p,
    list_hits,
    load_hits,
    value_of,
)

NO_TOKEN = tl.constexpr(2**31 - 1)
MIN_TEMPERATURE = tl.constexpr(reference_sampling.MIN_TEMPERATURE)


@Launcher
@triton.jit
def greedy_kernel(
    logits_ptr,
    scores_ptr,
    ids_ptr,
    has_nan_ptr,
    vocabulary,
    row_stride,
    CHUNK: tl.constexpr,
):
    """Program (row, chunk): the chunk's largest logit, its token, and whether there is a NaN."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * row_stride + columns, mask=columns < vocabulary, other=float("-inf"))
    score, token = best_of(cleaned(x), columns)
    place = row * tl.num_programs(1) + chunk
    tl.store(scores_ptr + place, score)
    tl.store(ids_ptr + place, token)
    tl.store(has_nan_ptr + place, tl.max((x != x).to(tl.int32), axis=0))


@Launcher
@triton.jit
def pick_kernel(
    scores_ptr,
    ids_ptr,
    has_nan_ptr,
    out_ptr,
    bad_ptr,
    newest_ptr,
    sequences_ptr,
    num_chunks,
    KEEPS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Program (row): the best of its chunks. With KEEPS it is also stored as the newest token of the row's sequence."""
    row = tl.program_id(0).to(tl.int64)
    score, token = _best_chunk(scores_ptr, ids_ptr, row, num_chunks, CHUNKS)
    chunks = tl.arange(0, CHUNKS)
    nans = tl.load(has_nan_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=0)
    is_bad = (tl.max(nans, axis=0) != 0) | (score == float("-inf"))
    tl.store(out_ptr + row, token.to(out_ptr.dtype.element_ty))
    tl.store(bad_ptr + row, is_bad.to(bad_ptr.dtype.element_ty))
    if KEEPS:
        tl.store(newest_ptr + tl.load(sequences_ptr + row), token.to(newest_ptr.dtype.element_ty))


@Launcher
@triton.jit
def scan_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    counters_ptr,
    scores_ptr,
    ids_ptr,
    peaks_ptr,
    masses_ptr,
    vocabulary,
    row_stride,
    num_tiles,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row, chunk). With filters it writes each tile's peak, and its mass relative to that. Without filters it
    writes the chunk's best logit (greedy) or best noisy logit, and `choose_kernel` picks the best chunk."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = row * tl.num_programs(1) + chunk
    temperature = tl.load(temperature_ptr + row)
    has_k, has_p, has_min = _filters(row, top_k_ptr, top_p_ptr, min_p_ptr, vocabulary)
    logits_ptr += row * row_stride
    if (temperature >= MIN_TEMPERATURE) & (has_k | has_p | has_min):
        peaks_ptr += row * num_tiles
        masses_ptr += row * num_tiles
        _scan_tiles(logits_ptr, peaks_ptr, masses_ptr, chunk, vocabulary, num_tiles, temperature, TILES, TILE)
    else:
        seed, counter = tl.load(seeds_ptr + row), tl.load(counters_ptr + row)
        score, token = _scan_scores(logits_ptr, chunk, vocabulary, temperature, seed, counter, TILES * TILE)
        tl.store(scores_ptr + place, score)
        tl.store(ids_ptr + place, token)


@Launcher
@triton.jit
def choose_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    counters_ptr,
    scores_ptr,
    ids_ptr,
    peaks_ptr,
    masses_ptr,
    hits_ptr,
    out_ptr,
    floor_ptr,
    vocabulary,
    row_stride,
    num_tiles,
    num_chunks,
    CHUNKS: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Program (row): picks the token from the chunks' best or, with filters, from the tiles that reach the floor."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    has_k, has_p, has_min = _filters(row, top_k_ptr, top_p_ptr, min_p_ptr, vocabulary)
    score, token = _best_chunk(scores_ptr, ids_ptr, row, num_chunks, CHUNKS)
    floor = tl.full([], float("-inf"), tl.float32)
    if (temperature >= MIN_TEMPERATURE) & (has_k | has_p | has_min):
        logits_ptr += row * row_stride
        hits_ptr += row * num_tiles
        inverse = tl.div_rn(1.0, temperature)
        tiles = tl.arange(0, TILES)
        peaks = tl.load(peaks_ptr + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))
        keys = tl.where(tiles < num_tiles, key_of(peaks), NO_KEY)
        score = tl.max(peaks, axis=0)
        low = key_of_min_p(tl.load(min_p_ptr + row), score, temperature)
        if has_k:
            k = tl.load(top_k_ptr + row).to(tl.float32)
            low = key_of_top_k(
                logits_ptr, hits_ptr, vocabulary, keys, k, low, score, inverse, TILES, TILE, GROUP
            )  # fmt: skip
        if has_p:
            masses = tl.load(masses_ptr + row * num_tiles + tiles, mask=tiles < num_tiles, other=0.0)
            low = key_of_top_p(
                logits_ptr, hits_ptr, vocabulary, keys, peaks, masses, tl.load(top_p_ptr + row), has_k | has_min,
                low, score, inverse, TILES, TILE, GROUP,
            )  # fmt: skip
        floor = value_of(low.to(tl.int32))
        num_hits = list_hits(hits_ptr, keys, low, TILES)
        seed, counter = tl.load(seeds_ptr + row), tl.load(counters_ptr + row)
        token = _draw(logits_ptr, hits_ptr, num_hits, vocabulary, floor, inverse, seed, counter, TILE, GROUP)
    tl.store(out_ptr + row, token.to(out_ptr.dtype.element_ty))
    tl.store(floor_ptr + row, floor)


@triton.jit
def _scan_tiles(
    logits_ptr,
    peaks_ptr,
    masses_ptr,
    chunk,
    vocabulary,
    num_tiles,
    temperature,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    tiles = chunk * TILES + tl.arange(0, TILES)
    columns = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
    x = cleaned(tl.load(logits_ptr + columns, mask=columns < vocabulary, other=float("-inf")))
    peaks = tl.max(x, axis=1)
    rise = (x - tl.where(peaks == float("-inf"), 0.0, peaks)[:, None]) * tl.div_rn(1.0, temperature)
    tl.store(peaks_ptr + tiles, peaks, mask=tiles < num_tiles)
    tl.store(masses_ptr + tiles, tl.sum(tl.exp(rise), axis=1), mask=tiles < num_tiles)


@triton.jit
def _scan_scores(logits_ptr, chunk, vocabulary, temperature, seed, counter, CHUNK: tl.constexpr):
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    scores = cleaned(tl.load(logits_ptr + columns, mask=columns < vocabulary, other=float("-inf")))
    if temperature >= MIN_TEMPERATURE:
        noise = _gumbel(seed, counter, chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4))
        scores = scores * tl.div_rn(1.0, temperature) + noise
    return best_of(scores, columns)


@triton.jit
def _filters(row, top_k_ptr, top_p_ptr, min_p_ptr, vocabulary):
    """Which filters the row has. Comparisons with a NaN, as in a padded row, switch a filter off."""
    k = tl.load(top_k_ptr + row)
    return (k > 0) & (k < vocabulary), tl.load(top_p_ptr + row) < 1.0, tl.load(min_p_ptr + row) > 0.0


@triton.jit
def best_of(scores, columns):
    """The largest score and the lowest column with it."""
    score = tl.max(scores, axis=0)
    return score, tl.min(tl.where(scores == score, columns, NO_TOKEN), axis=0)


@triton.jit
def _best_chunk(scores_ptr, ids_ptr, row, num_chunks, CHUNKS: tl.constexpr):
    chunks = tl.arange(0, CHUNKS)
    inside = chunks < num_chunks
    places = row * num_chunks + chunks
    scores = tl.load(scores_ptr + places, mask=inside, other=float("-inf"))
    tokens = tl.load(ids_ptr + places, mask=inside, other=NO_TOKEN)
    return best_of(scores, tokens)


@triton.jit
def _gumbel(seed, counter, quads):
    """The noise of tokens 4q ... 4q + 3 for each q in quads, in order. See `reference_sampling.gumbel`."""
    zeros = quads * 0
    low, high = zeros + counter.to(tl.int32), zeros + (counter >> 32).to(tl.int32)
    a, b, c, d = tl.philox(seed, quads, low, high, zeros)
    bits = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    v = tl.minimum(bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.99999994039535522)
    series = v * (1.0 + v * (0.5 + v * (0.3333333333333333 + v * (0.25 + v * 0.2))))
    return -tl.log(tl.where(v < 0.0625, series, -tl.log(1.0 - v)))


@triton.jit
def _draw(
    logits_ptr,
    hits_ptr,
    num_hits,
    vocabulary,
    floor,
    inverse,
    seed,
    counter,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The token with the best noisy score among logits at or above the floor in the listed tiles."""
    best = float("-inf")
    token = 0
    for first in range(0, num_hits, GROUP):
        x, columns = load_hits(logits_ptr, hits_ptr, first, num_hits, vocabulary, TILE, GROUP)
        hits = first + tl.arange(0, TILE * GROUP // 4) // (TILE // 4)
        tiles = tl.load(hits_ptr + hits, mask=hits < num_hits, other=0)
        noise = _gumbel(seed, counter, tiles * (TILE // 4) + tl.arange(0, TILE * GROUP // 4) % (TILE // 4))
        score, where = best_of(tl.where(x >= floor, x * inverse + noise, float("-inf")), columns)
        token = tl.where(score > best, where, token)
        best = tl.maximum(score, best)
    return token

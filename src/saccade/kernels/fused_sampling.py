"""Triton versions of sampling, with the signatures of `saccade.kernels.reference_sampling`. Launches depend only on
shapes and strides, so they can be captured. Logits may be rows of a wider tensor."""

import torch
from torch import Tensor

from saccade.errors import ConfigError
from saccade.kernels.grids import cdiv, next_power_of_2
from saccade.kernels.reference_sampling import TokenPlaces
from saccade.kernels.triton_logits import (
    allow_kernel,
    bias_kernel,
    logprob_kernel,
    note_kernel,
    penalise_kernel,
    rank_kernel,
)
from saccade.kernels.triton_sampling import choose_kernel, greedy_kernel, pick_kernel, scan_kernel

MAX_LOGPROBS = 20
_TILE = 128
_CHUNK = 32 * _TILE  # 16 KiB of logits per program; a multiprocessor's registers hold at least three
_GROUP = 8  # tiles that a program reads at a time while searching
_EDIT_CHUNK = 2048  # columns per program of the edits
_BLOCK = 256


def greedy(logits_NV: Tensor, places: TokenPlaces | None = None) -> tuple[Tensor, Tensor]:
    num_rows, vocabulary = logits_NV.shape
    if places is None:
        ids_N = torch.empty(num_rows, dtype=torch.int64, device=logits_NV.device)
        is_bad_N = torch.empty(num_rows, dtype=torch.bool, device=logits_NV.device)
    else:
        ids_N, is_bad_N = places.ids_N, places.is_bad_N
    if num_rows == 0:
        return ids_N, is_bad_N
    num_chunks = cdiv(vocabulary, _CHUNK)
    scores, ids, nans = _per_chunk(logits_NV, torch.float32, torch.int32, torch.int32)
    greedy_kernel[(num_rows, num_chunks)](
        logits_NV, scores, ids, nans, vocabulary, logits_NV.stride(0), CHUNK=_CHUNK, num_warps=8
    )
    pick_kernel[(num_rows,)](
        scores,
        ids,
        nans,
        ids_N,
        _bytes(is_bad_N),
        ids_N if places is None else places.newest_S,
        ids if places is None else places.sequences_N,
        num_chunks,
        KEEPS=places is not None,
        CHUNKS=next_power_of_2(num_chunks),
        num_warps=1,
    )
    return ids_N, is_bad_N


def penalise(
    logits_NV: Tensor,
    seen_SV: Tensor,
    slots_N: Tensor,
    repetition_N: Tensor,
    presence_N: Tensor,
    frequency_N: Tensor,
) -> None:
    num_rows, vocabulary = logits_NV.shape
    if num_rows == 0:
        return
    penalise_kernel[(num_rows, cdiv(vocabulary, _EDIT_CHUNK))](
        logits_NV,
        seen_SV,
        slots_N,
        repetition_N,
        presence_N,
        frequency_N,
        vocabulary,
        seen_SV.shape[0],
        logits_NV.stride(0),
        seen_SV.stride(0),
        CHUNK=_EDIT_CHUNK,
        num_warps=8,
    )


def mark_prompt(seen_SV: Tensor, slots_T: Tensor, ids_T: Tensor, is_real_T: Tensor) -> None:
    _note(seen_SV, slots_T, ids_T, is_real_T, marks=True)


def count_tokens(seen_SV: Tensor, slots_N: Tensor, ids_N: Tensor, is_real_N: Tensor) -> None:
    _note(seen_SV, slots_N, ids_N, is_real_N, marks=False)


def apply_bias(logits_NV: Tensor, ids_NK: Tensor, values_NK: Tensor) -> None:
    _edit_listed(logits_NV, ids_NK, values_NK, adds=True)


def suppress(logits_NV: Tensor, ids_NK: Tensor, is_active_N: Tensor) -> None:
    _edit_listed(logits_NV, ids_NK, _bytes(is_active_N), adds=False)


def allow_only(logits_NV: Tensor, allowed_NW: Tensor) -> None:
    num_rows, vocabulary = logits_NV.shape
    if num_rows == 0:
        return
    strides = logits_NV.stride(0), allowed_NW.stride(0)
    grid = (num_rows, cdiv(vocabulary, _EDIT_CHUNK))
    allow_kernel[grid](logits_NV, allowed_NW, vocabulary, *strides, CHUNK=_EDIT_CHUNK, num_warps=8)


def sample(
    logits_NV: Tensor,
    temperature_N: Tensor,
    top_k_N: Tensor,
    top_p_N: Tensor,
    min_p_N: Tensor,
    seeds_N: Tensor,
    counters_N: Tensor,
) -> tuple[Tensor, Tensor]:
    num_rows, vocabulary = logits_NV.shape
    device = logits_NV.device
    ids_N = torch.empty(num_rows, dtype=torch.int64, device=device)
    floor_N = torch.empty(num_rows, dtype=torch.float32, device=device)
    if num_rows == 0:
        return ids_N, floor_N
    num_chunks, num_tiles = cdiv(vocabulary, _CHUNK), cdiv(vocabulary, _TILE)
    parameters = (temperature_N, top_k_N, top_p_N, min_p_N, seeds_N, counters_N)
    partial = _per_chunk(logits_NV, torch.float32, torch.int32)
    peaks, masses = torch.empty((2, num_rows, num_tiles), dtype=torch.float32, device=device)
    hits = torch.empty((num_rows, num_tiles), dtype=torch.int32, device=device)
    sizes = (vocabulary, logits_NV.stride(0), num_tiles)
    scan_kernel[(num_rows, num_chunks)](
        logits_NV, *parameters, *partial, peaks, masses, *sizes, TILES=_CHUNK // _TILE, TILE=_TILE, num_warps=8
    )
    choose_kernel[(num_rows,)](
        logits_NV,
        *parameters,
        *partial,
        peaks,
        masses,
        hits,
        ids_N,
        floor_N,
        *sizes,
        num_chunks,
        CHUNKS=next_power_of_2(num_chunks),
        TILES=next_power_of_2(num_tiles),
        TILE=_TILE,
        GROUP=_GROUP,
        num_warps=8,
    )
    return ids_N, floor_N


def logprobs(logits_NV: Tensor, ids_N: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows, vocabulary = logits_NV.shape
    k = min(k, vocabulary)
    if not 0 <= k <= MAX_LOGPROBS:
        raise ConfigError(f"{k} log-probabilities per token were requested; allowed: 0 to {MAX_LOGPROBS}")
    device = logits_NV.device
    chosen_N = torch.empty(num_rows, dtype=torch.float32, device=device)
    rank_N = torch.empty(num_rows, dtype=torch.int64, device=device)
    top_ids_NK = torch.empty((num_rows, k), dtype=torch.int64, device=device)
    top_NK = torch.empty((num_rows, k), dtype=torch.float32, device=device)
    if num_rows == 0:
        return chosen_N, rank_N, top_ids_NK, top_NK
    num_chunks = cdiv(vocabulary, _CHUNK)
    sums = _per_chunk(logits_NV, torch.float32, torch.float32, torch.int32)
    keys, ids = torch.empty((2, num_rows, num_chunks, max(1, k)), dtype=torch.int32, device=device)
    sizes = (vocabulary, logits_NV.stride(0))
    rank_kernel[(num_rows, num_chunks)](
        logits_NV, ids_N, *sums, keys, ids, *sizes, K=k, CHUNK=_CHUNK, num_warps=8
    )  # fmt: skip
    logprob_kernel[(num_rows,)](
        logits_NV,
        ids_N,
        *sums,
        keys,
        ids,
        chosen_N,
        rank_N,
        top_ids_NK,
        top_NK,
        *sizes,
        num_chunks,
        K=k,
        CHUNKS=next_power_of_2(num_chunks),
        LISTED=next_power_of_2(num_chunks * max(1, k)),
        num_warps=4,
    )
    return chosen_N, rank_N, top_ids_NK, top_NK


def _note(seen_SV: Tensor, slots_T: Tensor, ids_T: Tensor, is_real_T: Tensor, *, marks: bool) -> None:
    num_tokens = ids_T.shape[0]
    if num_tokens == 0:
        return
    note_kernel[(cdiv(num_tokens, _BLOCK),)](
        seen_SV,
        slots_T,
        ids_T,
        _bytes(is_real_T),
        num_tokens,
        seen_SV.stride(0),
        MARKS=marks,
        BLOCK=_BLOCK,
        num_warps=4,
    )


def _edit_listed(logits_NV: Tensor, ids_NK: Tensor, values: Tensor, *, adds: bool) -> None:
    num_rows, num_listed = ids_NK.shape
    if num_rows == 0 or num_listed == 0:
        return
    bias_kernel[(num_rows, cdiv(num_listed, _BLOCK))](
        logits_NV,
        ids_NK,
        values,
        num_listed,
        logits_NV.stride(0),
        ids_NK.stride(0),
        values.stride(0),
        ADDS=adds,
        BLOCK=_BLOCK,
        num_warps=4,
    )


def _per_chunk(logits_NV: Tensor, *dtypes: torch.dtype) -> list[Tensor]:
    shape = (logits_NV.shape[0], cdiv(logits_NV.shape[1], _CHUNK))
    return [torch.empty(shape, dtype=dtype, device=logits_NV.device) for dtype in dtypes]


def _bytes(flags: Tensor) -> Tensor:
    """Kernels load and store booleans as bytes."""
    return flags.view(torch.uint8)

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: PLR0913
"""Device code of `saccade.kernels.fused_sampling`: in-place edits of logits, and log-probabilities.

Penalties read only rows that have them, and only the logits of seen tokens; forbidding tokens reads no logits. Kernels
do not specialise on request parameters, because one request could then stall a shared step with a compilation.
"""

import triton
import triton.language as tl

from saccade.kernels.launch import Launcher
from saccade.kernels.triton_floor import NO_KEY, cleaned, key_of, value_of
from saccade.kernels.triton_sampling import NO_TOKEN, best_of

_IN_PROMPT = tl.constexpr(-(2**31))


@Launcher
@triton.jit
def penalise_kernel(
    logits_ptr,
    seen_ptr,
    slots_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    vocabulary,
    num_slots,
    row_stride,
    seen_stride,
    CHUNK: tl.constexpr,
):
    """Program (row, chunk)."""
    row = tl.program_id(0).to(tl.int64)
    repetition = tl.load(repetition_ptr + row)
    presence = tl.load(presence_ptr + row)
    frequency = tl.load(frequency_ptr + row)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        columns = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        slot = tl.minimum(tl.maximum(tl.load(slots_ptr + row).to(tl.int64), 0), num_slots - 1)
        seen = tl.load(seen_ptr + slot * seen_stride + columns, mask=columns < vocabulary, other=0)
        logits_ptr += row * row_stride
        x = tl.load(logits_ptr + columns, mask=seen != 0, other=0.0)
        counts = (seen & 0x7FFFFFFF).to(tl.float32)
        x = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
        x -= frequency * counts
        x -= tl.where(counts > 0, presence, 0.0)
        tl.store(logits_ptr + columns, x, mask=seen != 0)


@Launcher
@triton.jit(do_not_specialize=["num_tokens"])
def note_kernel(
    seen_ptr,
    slots_ptr,
    ids_ptr,
    is_real_ptr,
    num_tokens,
    seen_stride,
    MARKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Counts tokens, or with MARKS sets their prompt bit. Atomic, because a request may have a token twice."""
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_real = tl.load(is_real_ptr + tokens, mask=tokens < num_tokens, other=0) != 0
    slots = tl.load(slots_ptr + tokens, mask=is_real, other=0).to(tl.int64)
    ids = tl.load(ids_ptr + tokens, mask=is_real, other=0)
    places = seen_ptr + slots * seen_stride + ids
    if MARKS:
        tl.atomic_or(places, tl.full([BLOCK], _IN_PROMPT, tl.int32), mask=is_real)
    else:
        tl.atomic_add(places, tl.full([BLOCK], 1, tl.int32), mask=is_real)


@Launcher
@triton.jit(do_not_specialize=["num_listed", "ids_stride", "values_stride"])
def bias_kernel(
    logits_ptr,
    ids_ptr,
    values_ptr,
    num_listed,
    row_stride,
    ids_stride,
    values_stride,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, block of its list): with ADDS adds values[row, j] to the logit of token ids[row, j], otherwise
    forbids that token if values[row] is set."""
    row = tl.program_id(0).to(tl.int64)
    listed = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + row * ids_stride + listed, mask=listed < num_listed, other=-1)
    places = logits_ptr + row * row_stride + ids
    if ADDS:
        values = tl.load(values_ptr + row * values_stride + listed, mask=ids >= 0, other=0.0)
        x = tl.load(places, mask=ids >= 0, other=0.0)
        tl.store(places, x + values, mask=ids >= 0)
    else:
        ids = tl.where(tl.load(values_ptr + row) != 0, ids, -1)
        tl.store(places, tl.full([BLOCK], float("-inf"), tl.float32), mask=ids >= 0)


@Launcher
@triton.jit(do_not_specialize=["allowed_stride"])
def allow_kernel(logits_ptr, allowed_ptr, vocabulary, row_stride, allowed_stride, CHUNK: tl.constexpr):
    """Program (row, chunk): writes -inf wherever the token's bit is 0."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = columns < vocabulary
    words = tl.load(allowed_ptr + row * allowed_stride + columns // 32, mask=inside, other=-1)
    is_forbidden = ((words >> (columns % 32)) & 1) == 0
    tl.store(
        logits_ptr + row * row_stride + columns,
        tl.full([CHUNK], float("-inf"), tl.float32),
        mask=inside & is_forbidden,
    )


@Launcher
@triton.jit
def rank_kernel(
    logits_ptr,
    chosen_ptr,
    peaks_ptr,
    masses_ptr,
    num_above_ptr,
    top_keys_ptr,
    top_ids_ptr,
    vocabulary,
    row_stride,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (row, chunk): softmax sums, the number of logits above the chosen one, and the K largest in order."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = row * tl.num_programs(1) + chunk
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = columns < vocabulary
    logits_ptr += row * row_stride
    x = cleaned(tl.load(logits_ptr + columns, mask=inside, other=float("-inf")))
    chosen = cleaned(tl.load(logits_ptr + _valid(tl.load(chosen_ptr + row), vocabulary)))
    peak = tl.max(x, axis=0)
    tl.store(peaks_ptr + place, peak)
    tl.store(masses_ptr + place, tl.sum(tl.exp(x - tl.where(peak == float("-inf"), 0.0, peak)), axis=0))
    tl.store(num_above_ptr + place, tl.sum((x > chosen).to(tl.int32), axis=0))
    keys = tl.where(inside, key_of(x), NO_KEY)
    for i in range(K):
        key, token = best_of(keys, columns)
        tl.store(top_keys_ptr + place * K + i, key)
        tl.store(top_ids_ptr + place * K + i, token)
        keys = tl.where(columns == token, NO_KEY, keys)


@Launcher
@triton.jit
def logprob_kernel(
    logits_ptr,
    chosen_ptr,
    peaks_ptr,
    masses_ptr,
    num_above_ptr,
    top_keys_ptr,
    top_ids_ptr,
    logprob_ptr,
    rank_ptr,
    out_ids_ptr,
    out_logprobs_ptr,
    vocabulary,
    row_stride,
    num_chunks,
    K: tl.constexpr,
    CHUNKS: tl.constexpr,
    LISTED: tl.constexpr,
):
    """Program (row): combines its chunks. A chunk may list fewer than K tokens; the rest have NO_KEY."""
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS)
    inside = chunks < num_chunks
    places = row * num_chunks + chunks
    peaks = tl.load(peaks_ptr + places, mask=inside, other=float("-inf"))
    masses = tl.load(masses_ptr + places, mask=inside, other=0.0)
    peak = tl.max(peaks, axis=0)
    log_mass = tl.log(tl.sum(tl.where(masses > 0, masses * tl.exp(peaks - peak), 0.0), axis=0))
    chosen = tl.load(logits_ptr + row * row_stride + _valid(tl.load(chosen_ptr + row), vocabulary))
    num_above = tl.sum(tl.load(num_above_ptr + places, mask=inside, other=0), axis=0)
    tl.store(logprob_ptr + row, cleaned(chosen) - peak - log_mass)
    tl.store(rank_ptr + row, (num_above + 1).to(tl.int64))
    if K > 0:
        listed = tl.arange(0, LISTED)
        is_listed = listed < num_chunks * K
        keys = tl.load(top_keys_ptr + row * num_chunks * K + listed, mask=is_listed, other=NO_KEY)
        tokens = tl.load(top_ids_ptr + row * num_chunks * K + listed, mask=is_listed, other=NO_TOKEN)
        for i in range(K):
            key, token = best_of(keys, tokens)
            tl.store(out_ids_ptr + row * K + i, token.to(tl.int64))
            tl.store(out_logprobs_ptr + row * K + i, value_of(key) - peak - log_mass)
            keys = tl.where(tokens == token, NO_KEY, keys)


@triton.jit
def _valid(token, vocabulary):
    """A padded row may name any token."""
    return tl.minimum(tl.maximum(token.to(tl.int64), 0), vocabulary - 1)

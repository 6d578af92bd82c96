# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: PLR0913, PLR0915
"""Device code of `saccade.kernels.fused_decode`: attention of the newest row of each request, which norms and turns its
own queries and keys."""

import triton
import triton.language as tl

from saccade.kernels.overlap import await_inputs
from saccade.kernels.triton_attention import LOG2_E, accumulate_scores


@triton.jit
def _turned(x_ptr, mask, weight_a, weight_b, cos_a, cos_b, sin_a, sin_b, eps, NORMS: tl.constexpr, HALF: tl.constexpr):
    """Heads behind norm and rotary, as two halves; rounded to the dtype they come in."""
    first = tl.arange(0, HALF)[None, :]
    a = tl.load(x_ptr + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + HALF + first, mask=mask, other=0.0).to(tl.float32)
    if NORMS:
        scale = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / (2 * HALF) + eps)[:, None]
        a *= scale * weight_a
        b *= scale * weight_b
    element = x_ptr.dtype.element_ty
    return (a * cos_a - b * sin_a).to(element), (b * cos_b + a * sin_b).to(element)


@triton.jit
def _halves(x_ptr, HALF: tl.constexpr):
    first = tl.arange(0, HALF)[None, :]
    return tl.load(x_ptr + first).to(tl.float32), tl.load(x_ptr + HALF + first).to(tl.float32)


@triton.jit
def _norm_weight(weight_ptr, offset, NORMS: tl.constexpr, HALF: tl.constexpr):
    """In two halves; of a head without a norm nothing is read."""
    if NORMS:
        weight_a, weight_b = _halves(weight_ptr, HALF)
    else:
        weight_a = tl.zeros([1, HALF], dtype=tl.float32)
        weight_b = weight_a
    return weight_a + offset, weight_b + offset


@triton.jit
def _tile(
    keys,
    end,
    table_ptr,
    k_ptr,
    v_ptr,
    k_block_stride,
    k_slot_stride,
    v_block_stride,
    v_slot_stride,
    width,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Keys, transposed and in two halves, and values; zeros from `end` on."""
    HALF: tl.constexpr = D // 2
    blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys // BLOCK_SIZE < width, other=0).to(tl.int64)
    places = keys % BLOCK_SIZE
    cached = keys < end
    k_rows = k_ptr + (blocks * k_block_stride + places * k_slot_stride)[None, :] + tl.arange(0, HALF)[:, None]
    v_rows = v_ptr + (blocks * v_block_stride + places * v_slot_stride)[:, None] + tl.arange(0, D)[None, :]
    keys_a = tl.load(k_rows, mask=cached[None, :], other=0.0)
    keys_b = tl.load(k_rows + HALF, mask=cached[None, :], other=0.0)
    return keys_a, keys_b, tl.load(v_rows, mask=cached[:, None], other=0.0)


@triton.jit
def _accumulated(q_a, q_b, keys_a, keys_b, values, visible, scale, acc, peak, mass, PRECISION: tl.constexpr):
    scores = tl.dot(q_a, keys_a, input_precision=PRECISION)
    scores = tl.dot(q_b, keys_b, scores, input_precision=PRECISION) * scale
    return accumulate_scores(scores, values, visible[None, :], acc, peak, mass, PRECISION)


@triton.jit(do_not_specialize=("num_rows", "table_stride", "table_width"))
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    k_cache_ptr,
    v_cache_ptr,
    o_ptr,
    key_lengths_ptr,
    tables_ptr,
    partial_ptr,
    lse_ptr,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    cos_stride,
    sin_stride,
    k_block_stride,
    k_slot_stride,
    k_group_stride,
    v_block_stride,
    v_slot_stride,
    v_group_stride,
    table_stride,
    table_width,
    num_rows,
    num_heads,
    eps,
    offset,
    scale,
    D: tl.constexpr,
    SHARE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (share of the keys, key head, request): every SPLITS-th tile of keys. The first program of a head has the
    newest key and value in registers, counts and stores them. What was there before the queries, a tile of older keys
    above all, is read before the previous kernel is done. With SPLITS > 1 softmaxes go to `partial` and `lse` for
    `combine_kernel`."""
    HALF: tl.constexpr = D // 2
    split, group = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    num_keys = tl.load(key_lengths_ptr + row)
    end = num_keys - 1
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(num_keys - WINDOW, 0) // BLOCK_N * BLOCK_N
    table_ptr = tables_ptr + row * table_stride
    k_cache_ptr += group * k_group_stride
    v_cache_ptr += group * v_group_stride
    keys = begin + split * BLOCK_N + tl.arange(0, BLOCK_N)
    keys_a, keys_b, values = _tile(
        keys, end, table_ptr, k_cache_ptr, v_cache_ptr, k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
        table_width, D, BLOCK_SIZE,
    )  # fmt: skip
    cos_a, cos_b = _halves(cos_ptr + row * cos_stride, HALF)
    sin_a, sin_b = _halves(sin_ptr + row * sin_stride, HALF)
    q_weight_a, q_weight_b = _norm_weight(q_weight_ptr, offset, Q_NORM, HALF)
    k_weight_a, k_weight_b = _norm_weight(k_weight_ptr, offset, K_NORM, HALF)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    await_inputs(OVERLAPS)

    items = tl.arange(0, BLOCK_M)
    is_query = items < SHARE
    heads = group * SHARE + items
    columns = tl.arange(0, D)[None, :]
    q_rows = q_ptr + row * q_row_stride + heads[:, None] * q_head_stride
    q_a, q_b = _turned(q_rows, is_query[:, None], q_weight_a, q_weight_b, cos_a, cos_b, sin_a, sin_b, eps, Q_NORM, HALF)
    acc = tl.zeros([BLOCK_M, D], dtype=tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    mass = tl.zeros([BLOCK_M], dtype=tl.float32)
    if split == 0:
        one = tl.zeros([1, 1], dtype=tl.int32)
        k_row = k_ptr + row * k_row_stride + group * k_head_stride + one
        k_a, k_b = _turned(k_row, one == 0, k_weight_a, k_weight_b, cos_a, cos_b, sin_a, sin_b, eps, K_NORM, HALF)
        v = tl.load(v_ptr + row * v_row_stride + group * v_head_stride + columns)
        v = tl.where(v - v == 0, v, 0.0).to(v_ptr.dtype.element_ty)  # NaN and inf become 0, see the oracle
        block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        k_target = k_cache_ptr + block * k_block_stride + place * k_slot_stride
        first = tl.arange(0, HALF)[None, :]
        tl.store(k_target + first, k_a.to(k_cache_ptr.dtype.element_ty))
        tl.store(k_target + HALF + first, k_b.to(k_cache_ptr.dtype.element_ty))
        v_target = v_cache_ptr + block * v_block_stride + place * v_slot_stride
        tl.store(v_target + columns, v.to(v_cache_ptr.dtype.element_ty))
        if num_keys > 0:
            products = q_a.to(tl.float32) * k_a.to(tl.float32) + q_b.to(tl.float32) * k_b.to(tl.float32)
            peak = tl.sum(products, axis=1) * scale * LOG2_E
            mass += 1.0
            acc += v.to(tl.float32)
    visible = keys < end
    if WINDOW > 0:
        visible = visible & (keys > end - WINDOW)  # only the first of all tiles begins before the window
    acc, peak, mass = _accumulated(q_a, q_b, keys_a, keys_b, values, visible, scale, acc, peak, mass, PRECISION)
    for key in range(begin + (split + SPLITS) * BLOCK_N, end, SPLITS * BLOCK_N):
        more = key + tl.arange(0, BLOCK_N)
        more_a, more_b, more_values = _tile(
            more, end, table_ptr, k_cache_ptr, v_cache_ptr, k_block_stride, k_slot_stride, v_block_stride,
            v_slot_stride, table_width, D, BLOCK_SIZE,
        )  # fmt: skip
        acc, peak, mass = _accumulated(
            q_a, q_b, more_a, more_b, more_values, more < end, scale, acc, peak, mass, PRECISION
        )
    out = acc / tl.where(mass == 0.0, 1.0, mass)[:, None]
    if SPLITS > 1:
        targets = (split * num_rows + row) * num_heads + heads
        lse = tl.where(mass == 0.0, float("-inf"), peak + tl.log2(mass))
        tl.store(lse_ptr + targets, lse, mask=is_query)
        tl.store(partial_ptr + targets[:, None] * D + columns, out, mask=is_query[:, None])
    else:
        o_rows = o_ptr + (row * num_heads + heads)[:, None] * D
        tl.store(o_rows + columns, out.to(o_ptr.dtype.element_ty), mask=is_query[:, None])

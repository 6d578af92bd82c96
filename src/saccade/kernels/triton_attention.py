# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: PLR0913, PLR0915
"""Device code of `saccade.kernels.fused_attention`: online softmax over packed segments and paged keys.

Grids depend only on capacities. A program reads its boundaries from device memory and returns at once if its tile lies
outside them. Loads are masked by those boundaries, so values outside have no effect.
"""

import triton
import triton.language as tl

from saccade.kernels.launch import Launcher
from saccade.kernels.overlap import await_inputs

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _accumulate(q, k, v, visible, acc, peak, mass, scale, PRECISION: tl.constexpr):
    """Adds one tile of keys to the running softmax; k is transposed. A row that has seen no key keeps mass 0."""
    scores = tl.dot(q, k, input_precision=PRECISION) * scale
    scores = tl.where(visible, scores * _LOG2_E, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    anchor = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    p = tl.exp2(scores - anchor[:, None])
    shrink = tl.exp2(peak - anchor)
    mass = mass * shrink + tl.sum(p, axis=1)
    acc = acc * shrink[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, new_peak, mass


@Launcher
@triton.jit
def varlen_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    starts_ptr,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    o_row_stride,
    o_head_stride,
    scale,
    D: tl.constexpr,
    SHARE: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D_BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (tile of queries, head, segment)."""
    await_inputs(OVERLAPS)
    segment = tl.program_id(2)
    start = tl.load(starts_ptr + segment)
    length = tl.load(starts_ptr + segment + 1) - start
    first = tl.program_id(0) * BLOCK_M
    if first >= length:
        return
    head = tl.program_id(1)
    queries = first + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, D_BLOCK)
    in_head = columns < D
    rows = (start + queries).to(tl.int64)[:, None]
    q_mask = (queries < length)[:, None] & in_head[None, :]
    q = tl.load(q_ptr + rows * q_row_stride + head * q_head_stride + columns[None, :], mask=q_mask, other=0.0)
    k_ptr += (head // SHARE) * k_head_stride
    v_ptr += (head // SHARE) * v_head_stride
    acc = tl.zeros([BLOCK_M, D_BLOCK], dtype=tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    mass = tl.zeros([BLOCK_M], dtype=tl.float32)
    end = tl.minimum(first + BLOCK_M, length) if CAUSAL else length
    for key in range(0, end, BLOCK_N):
        keys = key + tl.arange(0, BLOCK_N)
        in_segment = keys < length
        key_rows = (start + keys).to(tl.int64)
        k = tl.load(
            k_ptr + key_rows[None, :] * k_row_stride + columns[:, None],
            mask=in_segment[None, :] & in_head[:, None],
            other=0.0,
        )
        v = tl.load(
            v_ptr + key_rows[:, None] * v_row_stride + columns[None, :],
            mask=in_segment[:, None] & in_head[None, :],
            other=0.0,
        )
        visible = in_segment[None, :]
        if CAUSAL:
            visible = visible & (keys[None, :] <= queries[:, None])
        acc, peak, mass = _accumulate(q, k, v, visible, acc, peak, mass, scale, PRECISION)
    out = acc / mass[:, None]
    o_rows = o_ptr + rows * o_row_stride + head * o_head_stride
    tl.store(o_rows + columns[None, :], out.to(o_ptr.dtype.element_ty), mask=q_mask)


@triton.jit
def _key_range(ends, first_position, split, SPLITS: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """The keys that a program visits: all that any of its queries sees, or an equal share of them with SPLITS > 1."""
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    end = tl.max(ends, axis=0)
    if SPLITS > 1:
        stretch = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), BLOCK_N), SPLITS) * BLOCK_N
        begin += split * stretch
        end = tl.minimum(end, begin + stretch)
    return begin, end


@Launcher
@triton.jit(do_not_specialize=("num_rows", "table_stride"))
def paged_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    o_ptr,
    query_start_ptr,
    key_lengths_ptr,
    tables_ptr,
    limits_ptr,
    partial_ptr,
    lse_ptr,
    q_row_stride,
    q_head_stride,
    k_block_stride,
    k_slot_stride,
    k_head_stride,
    v_block_stride,
    v_slot_stride,
    v_head_stride,
    o_row_stride,
    o_head_stride,
    table_stride,
    num_rows,
    num_heads,
    scale,
    D: tl.constexpr,
    SHARE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_LIMITS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D_BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (tile of queries and share of its keys, key head, request). A tile holds the SHARE query heads of one key
    head, so keys are loaded once for all of them. With SPLITS > 1 each program takes one stretch of the keys and writes
    its softmax to `partial` and `lse` for `combine_kernel`."""
    await_inputs(OVERLAPS)
    request = tl.program_id(2)
    start = tl.load(query_start_ptr + request)
    num_queries = tl.load(query_start_ptr + request + 1) - start
    first = tl.program_id(0) // SPLITS * BLOCK_M
    split = tl.program_id(0) % SPLITS
    if first >= num_queries * SHARE:
        return
    group = tl.program_id(1)
    num_keys = tl.load(key_lengths_ptr + request)
    items = first + tl.arange(0, BLOCK_M)
    queries = items // SHARE
    is_query = queries < num_queries
    rows = (start + queries).to(tl.int64)
    heads = group * SHARE + items % SHARE
    columns = tl.arange(0, D_BLOCK)
    in_head = columns < D
    q_mask = is_query[:, None] & in_head[None, :]
    q_rows = q_ptr + rows[:, None] * q_row_stride + heads[:, None] * q_head_stride
    q = tl.load(q_rows + columns[None, :], mask=q_mask, other=0.0)

    positions = num_keys - num_queries + queries
    ends = positions + 1
    if HAS_LIMITS:
        ends = tl.maximum(ends, tl.load(limits_ptr + rows, mask=is_query, other=0))
    ends = tl.where(is_query, tl.minimum(ends, num_keys), 0)
    first_position = num_keys - num_queries + first // SHARE
    begin, end = _key_range(ends, first_position, split, SPLITS, WINDOW, BLOCK_N)
    acc = tl.zeros([BLOCK_M, D_BLOCK], dtype=tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    mass = tl.zeros([BLOCK_M], dtype=tl.float32)
    table_ptr = tables_ptr + request.to(tl.int64) * table_stride
    for key in range(begin, end, BLOCK_N):
        keys = key + tl.arange(0, BLOCK_N)
        cached = keys < num_keys
        blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=cached, other=0).to(tl.int64)
        offsets = keys % BLOCK_SIZE
        k_rows = k_cache_ptr + blocks * k_block_stride + offsets * k_slot_stride + group * k_head_stride
        v_rows = v_cache_ptr + blocks * v_block_stride + offsets * v_slot_stride + group * v_head_stride
        k = tl.load(k_rows[None, :] + columns[:, None], mask=cached[None, :] & in_head[:, None], other=0.0)
        v = tl.load(v_rows[:, None] + columns[None, :], mask=cached[:, None] & in_head[None, :], other=0.0)
        visible = keys[None, :] < ends[:, None]
        if WINDOW > 0:
            visible = visible & (keys[None, :] > (positions - WINDOW)[:, None])
        acc, peak, mass = _accumulate(q, k, v, visible, acc, peak, mass, scale, PRECISION)
    out = acc / tl.where(mass == 0.0, 1.0, mass)[:, None]
    if SPLITS > 1:
        places = (split * num_rows + rows) * num_heads + heads
        lse = tl.where(mass == 0.0, float("-inf"), peak + tl.log2(mass))
        tl.store(lse_ptr + places, lse, mask=is_query)
        tl.store(partial_ptr + places[:, None] * D + columns[None, :], out, mask=q_mask)
    else:
        o_rows = o_ptr + rows[:, None] * o_row_stride + heads[:, None] * o_head_stride
        tl.store(o_rows + columns[None, :], out.to(o_ptr.dtype.element_ty), mask=q_mask)


@Launcher
@triton.jit(do_not_specialize=("num_items",))
def combine_kernel(
    partial_ptr,
    lse_ptr,
    o_ptr,
    num_items,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    D_BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Combines the partial softmaxes of one (row, head), weighted by 2 ** (lse - largest lse). SPLITS is 2 ** n."""
    await_inputs(OVERLAPS)
    item = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, D_BLOCK)
    places = tl.arange(0, SPLITS) * num_items + item
    lse = tl.load(lse_ptr + places)
    peak = tl.max(lse, axis=0)
    weights = tl.exp2(lse - tl.where(peak == float("-inf"), 0.0, peak))
    parts = tl.load(partial_ptr + places[:, None] * D + columns[None, :], mask=(columns < D)[None, :], other=0.0)
    mass = tl.sum(weights, axis=0)
    out = tl.sum(parts * weights[:, None], axis=0) / tl.where(mass == 0.0, 1.0, mass)
    tl.store(o_ptr + item * D + columns, out.to(o_ptr.dtype.element_ty), mask=columns < D)

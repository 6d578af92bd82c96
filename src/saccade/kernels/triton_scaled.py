# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: PLR0913
"""Device code of `saccade.kernels.scaled`: rows in e4m3, alone or fused with a norm or activation, and e4m3 products
over experts and of few rows.

A program holds a whole row, because the scale depends on all of it. The row is a block and a tail: one block of a power
of two would be half empty at many widths. Values are first rounded to the model's dtype, so that fused kernels give the
same result as separate ones.
"""

import triton
import triton.language as tl

from saccade.kernels.launch import Launcher
from saccade.kernels.overlap import await_inputs

LARGEST = tl.constexpr(448.0)
SMALLEST_SCALE = tl.constexpr(2.0**-40)
GROUP = tl.constexpr(128)


@triton.jit
def _largest(y, tail, TAIL: tl.constexpr):
    largest = tl.max(tl.abs(y), axis=0)
    if TAIL:
        largest = tl.maximum(largest, tl.max(tl.abs(tail), axis=0))
    return largest


@triton.jit
def _store_e4m3(out_ptr, y, columns, width):
    y = tl.maximum(y, -LARGEST, propagate_nan=tl.PropagateNan.ALL)
    y = tl.minimum(y, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out_ptr + columns, y.to(tl.float8e4nv), mask=columns < width)


@triton.jit
def _store_groups(y, START: tl.constexpr, width, out_ptr, scales_ptr, scale_stride, BLOCK: tl.constexpr):
    """Stores part of a row in e4m3, with a scale for every 128 values."""
    groups = tl.reshape(y, (BLOCK // GROUP, GROUP))
    scale = tl.maximum(tl.max(tl.abs(groups), axis=1) / LARGEST, SMALLEST_SCALE)
    places = START // GROUP + tl.arange(0, BLOCK // GROUP)
    tl.store(scales_ptr + places.to(tl.int64) * scale_stride, scale, mask=places * GROUP < width)
    y = tl.reshape(groups * (1.0 / scale)[:, None], (BLOCK,))
    _store_e4m3(out_ptr, y, START + tl.arange(0, BLOCK), width)


@triton.jit
def _store_scaled(
    y,
    tail,
    row,
    width,
    out_ptr,
    scales_ptr,
    scale_row_stride,
    scale_stride,
    input_scale_ptr,
    GIVEN: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Stores a row in e4m3, with a given scale (GIVEN), one scale for the row, or one for every 128 values (BLOCKS)."""
    out_ptr += row * width
    scales_ptr += row * scale_row_stride
    if BLOCKS:
        _store_groups(y, 0, width, out_ptr, scales_ptr, scale_stride, BLOCK)
        if TAIL:
            _store_groups(tail, BLOCK, width, out_ptr, scales_ptr, scale_stride, TAIL)
    else:
        own_scale = tl.maximum(_largest(y, tail, TAIL) / LARGEST, SMALLEST_SCALE)
        scale = tl.load(input_scale_ptr) if GIVEN else own_scale
        tl.store(scales_ptr, scale)
        _store_e4m3(out_ptr, y * (1.0 / scale), tl.arange(0, BLOCK), width)
        if TAIL:
            _store_e4m3(out_ptr, tail * (1.0 / scale), BLOCK + tl.arange(0, TAIL), width)


@triton.jit
def _activated(x_ptr, START: tl.constexpr, width, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Part of a row after its activation."""
    columns = START + tl.arange(0, BLOCK)
    inside = columns < width
    y = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if KIND == "silu" or KIND == "gated_silu":
        y = y * tl.sigmoid(y)
    elif KIND == "gelu_tanh" or KIND == "gated_gelu_tanh":
        y = y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))  # see `triton_fused.gated_kernel`
    elif KIND == "gelu" or KIND == "gated_gelu":
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    elif KIND == "quick_gelu" or KIND == "gated_quick_gelu":
        y = y * tl.sigmoid(1.702 * y)
    if KIND == "gated_silu" or KIND == "gated_gelu_tanh" or KIND == "gated_gelu" or KIND == "gated_quick_gelu":
        y *= tl.load(x_ptr + width + columns, mask=inside, other=0.0).to(tl.float32)
    return y.to(x_ptr.dtype.element_ty).to(tl.float32)


@Launcher
@triton.jit
def scaled_rows_kernel(
    x_ptr,
    out_ptr,
    scales_ptr,
    input_scale_ptr,
    width,
    x_stride,
    scale_row_stride,
    scale_stride,
    KIND: tl.constexpr,
    GIVEN: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program t: row t in e4m3 after an activation. KIND is "none" or one of `ACTIVATIONS`; with the prefix
    "gated_" the activation of the row's first half is multiplied with the second half."""
    await_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y = _activated(x_ptr, 0, width, KIND, BLOCK)
    tail = _activated(x_ptr, BLOCK, width, KIND, TAIL) if TAIL else y
    _store_scaled(
        y, tail, row, width, out_ptr, scales_ptr, scale_row_stride, scale_stride, input_scale_ptr,
        GIVEN, BLOCKS, BLOCK, TAIL,
    )  # fmt: skip


@triton.jit
def _summed(x_ptr, residual_ptr, total_ptr, START: tl.constexpr, width, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    """Part of a row; with ADDS the residual is added and the sum written to total."""
    columns = START + tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(residual_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + columns, total, mask=inside)
        x = total.to(tl.float32)
    return x


@triton.jit
def _part(ptr, START: tl.constexpr, width, BLOCK: tl.constexpr):
    columns = START + tl.arange(0, BLOCK)
    return tl.load(ptr + columns, mask=columns < width, other=0.0).to(tl.float32)


@Launcher
@triton.jit
def scaled_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    total_ptr,
    out_ptr,
    scales_ptr,
    input_scale_ptr,
    width,
    x_stride,
    residual_stride,
    scale_row_stride,
    scale_stride,
    eps,
    offset,
    ADDS: tl.constexpr,
    CENTRES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GIVEN: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program t: the norm of row t in e4m3, computed as in `triton_fused.norm_kernel`; the sum is written to total."""
    weight = _part(weight_ptr, 0, width, BLOCK) + offset
    tail_weight = _part(weight_ptr, BLOCK, width, TAIL) + offset if TAIL else weight
    await_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    residual_ptr += row * residual_stride
    total_ptr += row * width
    x = _summed(x_ptr, residual_ptr, total_ptr, 0, width, ADDS, BLOCK)
    tail = _summed(x_ptr, residual_ptr, total_ptr, BLOCK, width, ADDS, TAIL) if TAIL else x
    if CENTRES:
        mean = (tl.sum(x, axis=0) + (tl.sum(tail, axis=0) if TAIL else 0.0)) / width
        x = tl.where(tl.arange(0, BLOCK) < width, x - mean, 0.0)
        if TAIL:
            tail = tl.where(BLOCK + tl.arange(0, TAIL) < width, tail - mean, 0.0)
    squares = tl.sum(x * x, axis=0) + (tl.sum(tail * tail, axis=0) if TAIL else 0.0)
    factor = tl.rsqrt(squares / width + eps)
    y = x * factor * weight
    tail = tail * factor * tail_weight
    if HAS_BIAS:
        y += _part(bias_ptr, 0, width, BLOCK)
        if TAIL:
            tail += _part(bias_ptr, BLOCK, width, TAIL)
    element = total_ptr.dtype.element_ty
    y, tail = y.to(element).to(tl.float32), tail.to(element).to(tl.float32)
    _store_scaled(
        y, tail, row, width, out_ptr, scales_ptr, scale_row_stride, scale_stride, input_scale_ptr,
        GIVEN, BLOCKS, BLOCK, TAIL,
    )  # fmt: skip


@Launcher
@triton.jit
def grouped_kernel(
    x_ptr,
    scales_ptr,
    weight_ptr,
    weight_scales_ptr,
    bias_ptr,
    ends_ptr,
    y_ptr,
    num_experts,
    num_columns,
    x_stride,
    scale_row_stride,
    scale_stride,
    expert_scale_stride,
    weight_scale_row_stride,
    y_stride,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCKS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (i, j): block j of the columns of row tile i. No tile mixes experts; tiles are counted over all experts.

    The grid has room for the most tiles that any routing can need, so the last programs may have nothing to do.
    """
    experts = tl.arange(0, EXPERTS)
    there = experts < num_experts
    ends = tl.load(ends_ptr + experts, mask=there, other=0)
    starts = tl.where(experts > 0, tl.load(ends_ptr + experts - 1, mask=there & (experts > 0), other=0), 0)
    tiles = tl.where(there, tl.cdiv(ends - starts, ROWS), 0)
    tiles_before = tl.cumsum(tiles, axis=0) - tiles
    tile = tl.program_id(0)
    mine = there & (tile >= tiles_before) & (tile < tiles_before + tiles)
    expert = tl.sum(tl.where(mine, experts, 0), axis=0).to(tl.int64)
    first = tl.sum(tl.where(mine, starts + (tile - tiles_before) * ROWS, 0), axis=0)
    end = tl.sum(tl.where(mine, ends, 0), axis=0)
    if first >= end:
        return
    rows = first + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, GROUP)
    row_mask, column_mask = rows < end, columns < num_columns
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * x_stride + inner[None, :]
    weight_ptrs = weight_ptr + (expert * num_columns + columns)[None, :] * K + inner[:, None]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    weight_scales_ptr += expert * expert_scale_stride
    for start in range(0, K, GROUP):
        rest = start + inner < K
        x = tl.load(x_ptrs + start, mask=row_mask[:, None] & rest[None, :], other=0.0)
        weight = tl.load(weight_ptrs + start, mask=rest[:, None] & column_mask[None, :], other=0.0)
        if BLOCKS:
            group = start // GROUP
            x_scale = tl.load(scales_ptr + rows * scale_row_stride + group * scale_stride, mask=row_mask, other=0.0)
            where = weight_scales_ptr + (columns // GROUP) * weight_scale_row_stride + group
            weight_scale = tl.load(where, mask=column_mask, other=0.0)
            total += tl.dot(x, weight) * x_scale[:, None] * weight_scale[None, :]
        else:
            total = tl.dot(x, weight, total, input_precision="tf32x3")  # of float32 only
    if SCALED and not BLOCKS:
        x_scale = tl.load(scales_ptr + rows * scale_row_stride, mask=row_mask, other=0.0)
        weight_scale = tl.load(weight_scales_ptr + columns, mask=column_mask, other=0.0)
        total = total * x_scale[:, None] * weight_scale[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    y_ptrs = y_ptr + rows.to(tl.int64)[:, None] * y_stride + columns[None, :]
    tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


@Launcher
@triton.jit
def narrow_kernel(
    x_ptr,
    scales_ptr,
    weight_ptr,
    weight_scales_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    num_columns,
    y_stride,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program j: block j of the columns of a product with few rows. Its time is the time to read the weight, so tiles
    are narrow enough to keep every multiprocessor reading."""
    rows, inner = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row_mask, column_mask = rows < num_rows, columns < num_columns
    weight_ptrs = weight_ptr + columns.to(tl.int64)[None, :] * K + inner[:, None]
    x_ptrs = x_ptr + rows[:, None] * K + inner[None, :]
    weight_scale = tl.load(weight_scales_ptr + columns, mask=column_mask, other=0.0)
    await_inputs(OVERLAPS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, K, BLOCK):
        rest = start + inner < K
        x = tl.load(x_ptrs + start, mask=row_mask[:, None] & rest[None, :], other=0.0)
        weight = tl.load(weight_ptrs + start, mask=rest[:, None] & column_mask[None, :], other=0.0)
        total = tl.dot(x, weight, total)
    x_scale = tl.load(scales_ptr + rows, mask=row_mask, other=0.0)
    total = total * x_scale[:, None] * weight_scale[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    y_ptrs = y_ptr + rows[:, None] * y_stride + columns[None, :]
    tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])

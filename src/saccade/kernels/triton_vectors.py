# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: C901, PLR0913
"""Device code of `saccade.kernels.vectors`: a matrix times one row, bound by the bandwidth of the weights."""

import triton
import triton.language as tl

from saccade.kernels.overlap import await_inputs

GROUP = tl.constexpr(128)


@triton.jit
def _part(weight_ptr, inside, inner, START: tl.constexpr, K: tl.constexpr):
    """Numbers of the weight, from column START on."""
    return tl.load(weight_ptr + START, mask=inside[:, None] & (START + inner < K)[None, :], other=0.0)


@triton.jit
def _times(
    weight,
    x,
    scales_ptr,
    columns,
    start,
    scale_stride,
    inside,
    K: tl.constexpr,
    SCALES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """weight * x, times the scale of each 128 x 128 where those have one; summed where one thread has all of it, which
    keeps few registers busy."""
    VECTOR: tl.constexpr = 128 // weight.dtype.primitive_bitwidth
    product = weight.to(tl.float32) * x[None, :]
    if SCALES == 2:
        groups = start // GROUP + tl.arange(0, BLOCK // GROUP)
        where = scales_ptr + (columns // GROUP)[:, None] * scale_stride + groups[None, :]
        scale = tl.load(where, mask=inside[:, None] & (groups * GROUP < K)[None, :], other=0.0)
        product = tl.reshape(product, (COLUMNS, BLOCK // GROUP, GROUP)) * scale[:, :, None]
        product = tl.reshape(product, (COLUMNS, BLOCK))
    return tl.sum(tl.reshape(product, (COLUMNS, BLOCK // VECTOR, VECTOR)), axis=2)


@triton.jit
def _row(x_ptr, inner, start, K: tl.constexpr):
    return tl.load(x_ptr + start + inner, mask=start + inner < K, other=0.0).to(tl.float32)


@triton.jit
def _normed(x, residual_ptr, total_ptr, norm, inner, eps, ADDS: tl.constexpr, K: tl.constexpr):
    """The RMS norm of x + residual, rounded as `norm_kernel` does; the first program writes the sum."""
    element = total_ptr.dtype.element_ty
    if ADDS:
        x += _row(residual_ptr, inner, 0, K)
        total = x.to(element)
        if tl.program_id(0) == 0:
            tl.store(total_ptr + inner, total, mask=inner < K)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / K + eps)
    return (x * scale * norm).to(element).to(tl.float32)


@triton.jit
def vector_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    scales_ptr,
    residual_ptr,
    norm_ptr,
    total_ptr,
    num_columns,
    scale_stride,
    eps,
    offset,
    K: tl.constexpr,
    SCALES: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORMS: tl.constexpr,
    ADDS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program n: COLUMNS results; with GATED, silu(result) times the result of the weight row num_columns further on.
    With SCALES a row of the weight has one scale (1), or every 128 x 128 has (2). With NORMS the row is normed first,
    by every program, behind the addition of a residual with ADDS. The first PARTS blocks of weights, three at most, are
    loaded before the previous kernel is done."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < num_columns
    inner = tl.arange(0, BLOCK)
    weight_ptr += columns.to(tl.int64)[:, None] * K + inner[None, :]
    second_ptr = weight_ptr + num_columns.to(tl.int64) * K
    others = columns + num_columns
    weight = _part(weight_ptr, inside, inner, 0, K)
    if GATED:
        second = _part(second_ptr, inside, inner, 0, K)
    if PARTS > 1:
        weight_1 = _part(weight_ptr, inside, inner, BLOCK, K)
    if PARTS > 2:
        weight_2 = _part(weight_ptr, inside, inner, 2 * BLOCK, K)
    if NORMS:
        norm = _row(norm_ptr, inner, 0, K) + offset
    await_inputs(OVERLAPS)
    x = _row(x_ptr, inner, 0, K)
    if NORMS:
        x = _normed(x, residual_ptr, total_ptr, norm, inner, eps, ADDS, K)
    total = _times(weight, x, scales_ptr, columns, 0, scale_stride, inside, K, SCALES, COLUMNS, BLOCK)
    if GATED:
        total_second = _times(second, x, scales_ptr, others, 0, scale_stride, inside, K, SCALES, COLUMNS, BLOCK)
    if PARTS > 1:
        x = _row(x_ptr, inner, BLOCK, K)
        total += _times(weight_1, x, scales_ptr, columns, BLOCK, scale_stride, inside, K, SCALES, COLUMNS, BLOCK)
    if PARTS > 2:
        x = _row(x_ptr, inner, 2 * BLOCK, K)
        total += _times(weight_2, x, scales_ptr, columns, 2 * BLOCK, scale_stride, inside, K, SCALES, COLUMNS, BLOCK)
    for start in range(PARTS * BLOCK, K, BLOCK):
        mask = inside[:, None] & (start + inner < K)[None, :]
        x = _row(x_ptr, inner, start, K)
        weight = tl.load(weight_ptr + start, mask=mask, other=0.0)
        total += _times(weight, x, scales_ptr, columns, start, scale_stride, inside, K, SCALES, COLUMNS, BLOCK)
        if GATED:
            second = tl.load(second_ptr + start, mask=mask, other=0.0)
            total_second += _times(
                second, x, scales_ptr, others, start, scale_stride, inside, K, SCALES, COLUMNS, BLOCK
            )
    y = tl.sum(total, axis=1)
    if GATED:
        y_second = tl.sum(total_second, axis=1)
    if SCALES == 1:
        y *= tl.load(scales_ptr + columns, mask=inside, other=0.0)
        if GATED:
            y_second *= tl.load(scales_ptr + others, mask=inside, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        element = y_ptr.dtype.element_ty  # both products are rounded first, as with separate kernels
        gate = y.to(element).to(tl.float32)
        y = gate * tl.sigmoid(gate) * y_second.to(element).to(tl.float32)
    tl.store(y_ptr + columns, y.to(y_ptr.dtype.element_ty), mask=inside)

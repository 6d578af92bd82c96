# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: C901, PLR0913
"""Device code of `saccade.kernels.vectors`: a matrix times one row, bound by the bandwidth of the weights.

Blocks of a row have shape (BLOCK / 8, 8). Each thread then holds the same eight columns of the row and of the weight,
whatever their element sizes, so no data moves between threads and each thread adds its eight products at once.
"""

import triton
import triton.language as tl

from saccade.kernels.launch import Launcher
from saccade.kernels.overlap import await_inputs

GROUP = tl.constexpr(128)
VECTOR = tl.constexpr(8)


@triton.jit
def _part(weight_ptr, inside, inner, start, K: tl.constexpr):
    """A block of the weight's columns from `start` on."""
    return tl.load(weight_ptr + start, mask=inside[:, None, None] & (start + inner < K)[None, :, :], other=0.0)


@triton.jit
def _row(x_ptr, inner, start, K: tl.constexpr):
    return tl.load(x_ptr + start + inner, mask=start + inner < K, other=0.0).to(tl.float32)


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
    """Sums of eight products. With block scales (SCALES == 2), sums of 128 products times their scale."""
    sums = tl.sum(weight.to(tl.float32) * x[None, :, :], axis=2)
    if SCALES == 2:
        groups = start // GROUP + tl.arange(0, BLOCK // GROUP)
        where = scales_ptr + (columns // GROUP)[:, None] * scale_stride + groups[None, :]
        scale = tl.load(where, mask=inside[:, None] & (groups * GROUP < K)[None, :], other=0.0)
        sums = tl.sum(tl.reshape(sums, (COLUMNS, BLOCK // GROUP, GROUP // VECTOR)), axis=2) * scale
    return sums


@triton.jit
def _normed(x, residual_ptr, total_ptr, norm, inner, eps, offset, ADDS: tl.constexpr, K: tl.constexpr):
    """The RMS norm of x + residual, rounded as in `norm_kernel`. The first program writes the sum."""
    element = total_ptr.dtype.element_ty
    if ADDS:
        x += _row(residual_ptr, inner, 0, K)
        total = x.to(element)
        if tl.program_id(0) == 0:
            tl.store(total_ptr + inner, total, mask=inner < K)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(tl.sum(x * x, axis=1), axis=0) / K + eps)
    return (x * scale * (norm.to(tl.float32) + offset)).to(element).to(tl.float32)


@Launcher
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
    OVERLAPS: tl.constexpr,
):
    """Program n: COLUMNS results. With GATED, silu(result) times the result of the weight row num_columns further on.
    SCALES is 0 for no scales, 1 for one per row of the weight, 2 for one per 128 x 128 block. With NORMS every program
    first normalises the row, with ADDS after adding the residual. The first block of weights is loaded before the
    previous kernel is done."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < num_columns
    others = columns + num_columns
    inner = tl.arange(0, BLOCK // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    weight_ptr += columns.to(tl.int64)[:, None, None] * K + inner[None, :, :]
    second_ptr = weight_ptr + num_columns.to(tl.int64) * K
    weight = _part(weight_ptr, inside, inner, 0, K)
    if GATED:
        second = _part(second_ptr, inside, inner, 0, K)
    if NORMS:
        norm = tl.load(norm_ptr + inner, mask=inner < K, other=0.0)
    await_inputs(OVERLAPS)
    x = _row(x_ptr, inner, 0, K)
    if NORMS:
        x = _normed(x, residual_ptr, total_ptr, norm, inner, eps, offset, ADDS, K)
    total = _times(weight, x, scales_ptr, columns, 0, scale_stride, inside, K, SCALES, COLUMNS, BLOCK)
    if GATED:
        total_second = _times(second, x, scales_ptr, others, 0, scale_stride, inside, K, SCALES, COLUMNS, BLOCK)
    for start in range(BLOCK, K, BLOCK):
        x = _row(x_ptr, inner, start, K)
        weight = _part(weight_ptr, inside, inner, start, K)
        total += _times(weight, x, scales_ptr, columns, start, scale_stride, inside, K, SCALES, COLUMNS, BLOCK)
        if GATED:
            second = _part(second_ptr, inside, inner, start, K)
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

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: PLR0913
"""Device code of `saccade.kernels.vectors`: a matrix times one row, bound by the bandwidth of the weights."""

import triton
import triton.language as tl

from saccade.kernels.overlap import await_inputs

GROUP = tl.constexpr(128)


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
    """weight * x, times the scale of each 128 x 128 where those have one."""
    product = weight.to(tl.float32) * x
    if SCALES == 2:
        groups = start // GROUP + tl.arange(0, BLOCK // GROUP)
        where = scales_ptr + (columns // GROUP)[:, None] * scale_stride + groups[None, :]
        scale = tl.load(where, mask=inside[:, None] & (groups * GROUP < K)[None, :], other=0.0)
        product = tl.reshape(product, (COLUMNS, BLOCK // GROUP, GROUP)) * scale[:, :, None]
        product = tl.reshape(product, (COLUMNS, BLOCK))
    return product


@triton.jit
def vector_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    scales_ptr,
    num_columns,
    scale_stride,
    K: tl.constexpr,
    SCALES: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program n: COLUMNS results; with GATED, silu(result) times the result of the weight row num_columns further on.
    With SCALES a row of the weight has one scale (1), or every 128 x 128 has (2). The first block of weights is loaded
    before the previous kernel is done."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < num_columns
    inner = tl.arange(0, BLOCK)
    mask = inside[:, None] & (inner < K)[None, :]
    weight_ptr += columns.to(tl.int64)[:, None] * K + inner[None, :]
    second_ptr = weight_ptr + num_columns.to(tl.int64) * K
    weight = tl.load(weight_ptr, mask=mask, other=0.0)
    if GATED:
        second = tl.load(second_ptr, mask=mask, other=0.0)
    await_inputs(OVERLAPS)
    x = tl.load(x_ptr + inner, mask=inner < K, other=0.0).to(tl.float32)[None, :]
    total = _times(weight, x, scales_ptr, columns, 0, scale_stride, inside, K, SCALES, COLUMNS, BLOCK)
    if GATED:
        others = columns + num_columns
        total_second = _times(second, x, scales_ptr, others, 0, scale_stride, inside, K, SCALES, COLUMNS, BLOCK)
    for start in range(BLOCK, K, BLOCK):
        rest = start + inner < K
        mask = inside[:, None] & rest[None, :]
        x = tl.load(x_ptr + start + inner, mask=rest, other=0.0).to(tl.float32)[None, :]
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

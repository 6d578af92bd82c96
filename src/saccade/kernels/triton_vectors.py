# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: PLR0913
"""Device code of `saccade.kernels.vectors`: a matrix times one row, bound by the bandwidth of the weights."""

import triton
import triton.language as tl

from saccade.kernels.overlap import await_inputs


@triton.jit
def vector_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    num_columns,
    K: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program n: COLUMNS results; with GATED, silu(result) times the result of the weight row num_columns further on.
    The first block of weights is loaded before the previous kernel is done."""
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
    total = weight.to(tl.float32) * x
    if GATED:
        total_second = second.to(tl.float32) * x
    for start in range(BLOCK, K, BLOCK):
        rest = start + inner < K
        mask = inside[:, None] & rest[None, :]
        x = tl.load(x_ptr + start + inner, mask=rest, other=0.0).to(tl.float32)[None, :]
        total += tl.load(weight_ptr + start, mask=mask, other=0.0).to(tl.float32) * x
        if GATED:
            total_second += tl.load(second_ptr + start, mask=mask, other=0.0).to(tl.float32) * x
    y = tl.sum(total, axis=1)
    if HAS_BIAS:
        y += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        element = y_ptr.dtype.element_ty  # both products are rounded first, as with separate kernels
        gate = y.to(element).to(tl.float32)
        y = gate * tl.sigmoid(gate) * tl.sum(total_second, axis=1).to(element).to(tl.float32)
    tl.store(y_ptr + columns, y.to(y_ptr.dtype.element_ty), mask=inside)

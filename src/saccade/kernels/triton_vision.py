# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: PLR0913
"""Device code of `saccade.kernels.fused_vision`: rotary in place, interpolated positions, scattered rows.

Strides inside a row are compile-time numbers: heads of 72 columns are no multiple of 16, and with a stride that is only
known at run time Triton would load them two bytes at a time.
"""

import triton
import triton.language as tl

from saccade.kernels.overlap import await_inputs


@triton.jit
def rotate_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    row_stride,
    cos_stride,
    sin_stride,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program t: all query and key heads of row t, in place. HEADS counts both."""
    await_inputs(OVERLAPS)
    HALF: tl.constexpr = K // 2
    row = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS_BLOCK)[:, None]
    columns = tl.arange(0, HALF_BLOCK)[None, :]
    in_half = columns < HALF
    inside = (heads < HEADS) & in_half
    first_ptr = qkv_ptr + row * row_stride + heads * K + columns
    cos = tl.load(cos_ptr + row * cos_stride + columns, mask=in_half, other=0.0)
    sin = tl.load(sin_ptr + row * sin_stride + columns, mask=in_half, other=0.0)
    a = tl.load(first_ptr, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(first_ptr + HALF, mask=inside, other=0.0).to(tl.float32)
    element = qkv_ptr.dtype.element_ty
    tl.store(first_ptr, (a * cos - b * sin).to(element), mask=inside)
    tl.store(first_ptr + HALF, (b * cos + a * sin).to(element), mask=inside)


@triton.jit(do_not_specialize=("num_rows",))
def positions_kernel(
    x_ptr,
    table_ptr,
    indices_ptr,
    weights_ptr,
    y_ptr,
    num_rows,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program t: row t of x plus four weighed rows of the table. The taps of all rows lie one after the other."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for tap in tl.static_range(4):
        index = tl.load(indices_ptr + tap * num_rows + row).to(tl.int64)
        weight = tl.load(weights_ptr + tap * num_rows + row)
        total += tl.load(table_ptr + index * D + columns, mask=inside, other=0.0).to(tl.float32) * weight
    element = y_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * D + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * D + columns, (x + total.to(element).to(tl.float32)).to(element), mask=inside)


@triton.jit
def place_kernel(
    embeds_ptr,
    rows_ptr,
    sources_ptr,
    others_ptr,
    num_rows,
    level_stride,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (t, level, stretch): a stretch of the vision row that stands at token t. Level 0 goes over the embedding,
    which stays where there is none; the other levels to rows of their own, which are zero there."""
    await_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    level = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources_ptr + row).to(tl.int64)
    is_seen = columns < tl.where(source >= 0, D, 0)
    values = tl.load(rows_ptr + level * level_stride + source * D + columns, mask=is_seen, other=0.0)
    if level == 0:
        tl.store(embeds_ptr + row * D + columns, values, mask=is_seen)
    else:
        place = (level - 1) * num_rows + row
        tl.store(others_ptr + place * D + columns, values, mask=columns < D)


@triton.jit
def scatter_kernel(
    rows_ptr,
    targets_ptr,
    out_ptr,
    level_stride,
    out_level_stride,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (u, level, stretch): a stretch of row u of a level to row targets[u]."""
    unit = tl.program_id(0).to(tl.int64)
    level = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < D
    target = tl.load(targets_ptr + unit).to(tl.int64)
    values = tl.load(rows_ptr + level * level_stride + unit * D + columns, mask=inside, other=0.0)
    tl.store(out_ptr + level * out_level_stride + target * D + columns, values, mask=inside)

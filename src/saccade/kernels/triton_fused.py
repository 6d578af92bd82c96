# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: PLR0913
"""Device code of `saccade.kernels.fused`: norms, gated activations, rotary and key/value writes.

Every program loads its data once, computes in float32 and stores once. Row indices are widened to 64 bits before they
are multiplied by a stride, because a large cache has more than 2**31 elements.
"""

import triton
import triton.language as tl

from saccade.kernels.launch import Launcher
from saccade.kernels.overlap import await_inputs


@Launcher
@triton.jit(do_not_specialize=("num_rows",))
def norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    total_ptr,
    num_rows,
    width,
    x_stride,
    residual_stride,
    eps,
    offset,
    ADDS: tl.constexpr,
    CENTRES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """y = norm(x); with ADDS y = norm(x + residual) and total is the sum. RMS norm, or layer norm with CENTRES."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (rows < num_rows) & (columns < width)
    weight = tl.load(weight_ptr + columns, mask=columns < width, other=0.0).to(tl.float32) + offset
    await_inputs(OVERLAPS)
    x = tl.load(x_ptr + rows * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(residual_ptr + rows * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + rows * width + columns, total, mask=inside)
        x = total.to(tl.float32)
    if CENTRES:
        mean = tl.sum(x, axis=1)[:, None] / width
        x = tl.where(inside, x - mean, 0.0)
    scale = tl.rsqrt(tl.sum(x * x, axis=1)[:, None] / width + eps)
    y = x * scale * weight
    if HAS_BIAS:
        y += tl.load(bias_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    tl.store(y_ptr + rows * width + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


@Launcher
@triton.jit
def gated_kernel(
    x_ptr,
    y_ptr,
    width,
    x_stride,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (row, block of columns): y = activation(gate) * up, where the row is [gate | up]."""
    await_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + width + columns, mask=inside, other=0.0).to(tl.float32)
    if KIND == "silu":
        y = gate * tl.sigmoid(gate) * up
    elif KIND == "gelu_tanh":
        # 0.5 * (1 + tanh(u)) is sigmoid(2u); Triton's portable language has no tanh.
        y = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    elif KIND == "quick_gelu":
        y = gate * tl.sigmoid(1.702 * gate) * up
    else:
        y = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    tl.store(y_ptr + row * width + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


@Launcher
@triton.jit(do_not_specialize=("num_rows",))
def newest_kernel(ids_ptr, pending_ptr, newest_ptr, out_ptr, num_rows, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    """Program: a block of rows, each with the newest token of its sequence or, if that is negative, its own token."""
    await_inputs(OVERLAPS)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_rows
    sequence = tl.load(pending_ptr + rows, mask=inside, other=-1)
    own = tl.load(ids_ptr + rows, mask=inside & (sequence < 0), other=0).to(tl.int64)
    newest = tl.load(newest_ptr + sequence, mask=sequence >= 0, other=0)
    tl.store(out_ptr + rows, tl.where(sequence < 0, own, newest), mask=inside)


@Launcher
@triton.jit(do_not_specialize=("num_rows", "axis_stride"))
def tables_kernel(
    positions_ptr,
    axes_ptr,
    frequencies_ptr,
    cos_ptr,
    sin_ptr,
    num_rows,
    axis_stride,
    row_stride,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program: cosines and sines of ROWS positions. Both halves of a row are the same."""
    columns = tl.arange(0, BLOCK)[None, :]
    axes = tl.load(axes_ptr + columns, mask=columns < F, other=0)
    frequencies = tl.load(frequencies_ptr + columns, mask=columns < F, other=0.0)
    await_inputs(OVERLAPS)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    inside = (rows < num_rows) & (columns < F)
    positions = tl.load(positions_ptr + axes * axis_stride + rows * row_stride, mask=inside, other=0)
    angles = positions.to(tl.float32) * frequencies
    cos, sin = tl.cos(angles), tl.sin(angles)
    places = rows * (2 * F) + columns
    tl.store(cos_ptr + places, cos, mask=inside)
    tl.store(cos_ptr + places + F, cos, mask=inside)
    tl.store(sin_ptr + places, sin, mask=inside)
    tl.store(sin_ptr + places + F, sin, mask=inside)


@triton.jit
def _norm_rotary_heads(
    x_ptr,
    x_head_stride,
    y_ptr,
    y_head_stride,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    first_head,
    num_heads,
    eps,
    offset,
    D: tl.constexpr,
    W: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    """A tile of heads of one row: the two halves that rotary turns, and the columns past them if W < D."""
    HALF: tl.constexpr = W // 2
    heads = (first_head + tl.arange(0, HEADS))[:, None]
    first = tl.arange(0, HALF_BLOCK)[None, :]
    in_half = first < HALF
    inside = (heads < num_heads) & in_half
    x_ptr += heads * x_head_stride
    y_ptr += heads * y_head_stride
    a = tl.load(x_ptr + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + HALF + first, mask=inside, other=0.0).to(tl.float32)
    if REST_BLOCK > 0:
        rest = W + tl.arange(0, REST_BLOCK)[None, :]
        in_rest = (heads < num_heads) & (rest < D)
        c = tl.load(x_ptr + rest, mask=in_rest, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(a * a + b * b, axis=1)
        if REST_BLOCK > 0:
            squares += tl.sum(c * c, axis=1)
        scale = tl.rsqrt(squares / D + eps)[:, None]
        a *= scale * (tl.load(weight_ptr + first, mask=in_half, other=0.0).to(tl.float32) + offset)
        b *= scale * (tl.load(weight_ptr + HALF + first, mask=in_half, other=0.0).to(tl.float32) + offset)
        if REST_BLOCK > 0:
            c *= scale * (tl.load(weight_ptr + rest, mask=rest < D, other=0.0).to(tl.float32) + offset)
    cos_a = tl.load(cos_ptr + first, mask=in_half, other=0.0).to(tl.float32)
    sin_a = tl.load(sin_ptr + first, mask=in_half, other=0.0).to(tl.float32)
    cos_b = tl.load(cos_ptr + HALF + first, mask=in_half, other=0.0).to(tl.float32)
    sin_b = tl.load(sin_ptr + HALF + first, mask=in_half, other=0.0).to(tl.float32)
    element = y_ptr.dtype.element_ty
    tl.store(y_ptr + first, (a * cos_a - b * sin_a).to(element), mask=inside)
    tl.store(y_ptr + HALF + first, (b * cos_b + a * sin_b).to(element), mask=inside)
    if REST_BLOCK > 0:
        tl.store(y_ptr + rest, c.to(element), mask=in_rest)


@triton.jit
def _store_finite_heads(
    x_ptr,
    x_head_stride,
    y_ptr,
    y_head_stride,
    first_head,
    num_heads,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    D_BLOCK: tl.constexpr,
):
    """Copies a tile of heads of one row. NaN and inf become 0, as in the oracle."""
    heads = (first_head + tl.arange(0, HEADS))[:, None]
    columns = tl.arange(0, D_BLOCK)[None, :]
    inside = (heads < num_heads) & (columns < D)
    x = tl.load(x_ptr + heads * x_head_stride + columns, mask=inside, other=0.0)
    x = tl.where(x - x == 0, x, 0.0)
    tl.store(y_ptr + heads * y_head_stride + columns, x.to(y_ptr.dtype.element_ty), mask=inside)


@Launcher
@triton.jit
def rotary_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_out_ptr,
    k_out_ptr,
    v_out_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    num_q_heads,
    num_kv_heads,
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
    k_out_head_stride,
    v_block_stride,
    v_slot_stride,
    v_out_head_stride,
    eps,
    offset,
    D: tl.constexpr,
    W: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    D_BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (t, i): the i-th tile of row t's heads, counted over queries, then keys, then values. Keys and values go
    to slot slots[t] of the cache."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    q_tiles = tl.cdiv(num_q_heads, HEADS)
    kv_tiles = tl.cdiv(num_kv_heads, HEADS)
    await_inputs(OVERLAPS)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    cos_ptr += row * cos_stride
    sin_ptr += row * sin_stride
    if tile < q_tiles:
        _norm_rotary_heads(
            q_ptr + row * q_row_stride, q_head_stride, q_out_ptr + row * num_q_heads * D, D,
            q_weight_ptr, cos_ptr, sin_ptr, tile * HEADS, num_q_heads, eps, offset,
            D, W, Q_NORM, HEADS, HALF_BLOCK, REST_BLOCK,
        )  # fmt: skip
    elif tile < q_tiles + kv_tiles:
        _norm_rotary_heads(
            k_ptr + row * k_row_stride, k_head_stride,
            k_out_ptr + block * k_block_stride + place * k_slot_stride, k_out_head_stride,
            k_weight_ptr, cos_ptr, sin_ptr, (tile - q_tiles) * HEADS, num_kv_heads, eps, offset,
            D, W, K_NORM, HEADS, HALF_BLOCK, REST_BLOCK,
        )  # fmt: skip
    else:
        _store_finite_heads(
            v_ptr + row * v_row_stride, v_head_stride,
            v_out_ptr + block * v_block_stride + place * v_slot_stride, v_out_head_stride,
            (tile - q_tiles - kv_tiles) * HEADS, num_kv_heads, D, HEADS, D_BLOCK,
        )  # fmt: skip

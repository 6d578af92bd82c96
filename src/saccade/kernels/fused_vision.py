# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: PLR0913
"""Triton and cuBLAS versions of the vision-tower kernels, with the signatures of `reference_vision`. Strides inside a
row are compile-time constants: a head of 72 columns is not a multiple of 16, and with a run-time stride Triton would
load it two bytes at a time."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from saccade.kernels.grids import cdiv, next_power_of_2
from saccade.kernels.launch import Launcher
from saccade.kernels.overlap import await_inputs, overlapping
from saccade.kernels.reference_vision import activate

_BLOCK = 2048
_HALF_DTYPES = (torch.float16, torch.bfloat16)


def rotate_packed(qkv_PX: Tensor, num_heads: int, cos_PK: Tensor, sin_PK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotates in place; q, k and v are views of one product."""
    num_rows, width = qkv_PX.shape
    head_width = width // (3 * num_heads)
    assert qkv_PX.stride(1) == 1 and cos_PK.shape[1] == head_width, (qkv_PX.stride(), cos_PK.shape, head_width)
    if num_rows:
        rotate_kernel[(num_rows,)](
            qkv_PX,
            cos_PK,
            sin_PK,
            qkv_PX.stride(0),
            cos_PK.stride(0),
            sin_PK.stride(0),
            HEADS=2 * num_heads,
            K=head_width,
            HEADS_BLOCK=next_power_of_2(2 * num_heads),
            HALF_BLOCK=next_power_of_2(head_width // 2),
            num_warps=4,
            **overlapping(qkv_PX),
        )
    q_PHK, k_PHK, v_PHK = qkv_PX.view(num_rows, 3, num_heads, head_width).unbind(1)
    return q_PHK, k_PHK, v_PHK


def activated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """cuBLAS fuses bias and tanh-GELU into the product."""
    if kind == "gelu_tanh" and bias is not None and x.dtype in _HALF_DTYPES and x.dim() == 2 and x.shape[0] > 1:
        return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
    return activate(functional.linear(x, weight, bias), kind)


def add_positions(x_PD: Tensor, table_GD: Tensor, indices_4P: Tensor, weights_4P: Tensor) -> Tensor:
    x_PD, indices_4P, weights_4P = x_PD.contiguous(), indices_4P.contiguous(), weights_4P.contiguous()
    num_rows, width = x_PD.shape
    y_PD = torch.empty_like(x_PD)
    if num_rows:
        positions_kernel[(num_rows,)](
            x_PD,
            table_GD,
            indices_4P,
            weights_4P,
            y_PD,
            num_rows,
            D=width,
            BLOCK=next_power_of_2(width),
            num_warps=4,
        )
    return y_PD


def place_rows(embeds_TD: Tensor, rows_LED: Tensor, sources_T: Tensor) -> tuple[Tensor, Tensor]:
    """Overwrites the embeddings."""
    num_levels, _, width = rows_LED.shape
    num_rows = embeds_TD.shape[0]
    assert embeds_TD.is_contiguous() and rows_LED.stride()[1:] == (width, 1), (embeds_TD.stride(), rows_LED.stride())
    others = torch.empty((num_levels - 1, num_rows, width), dtype=embeds_TD.dtype, device=embeds_TD.device)
    if num_rows:
        grid = (num_rows, num_levels, cdiv(width, _BLOCK))
        place_kernel[grid](
            embeds_TD,
            rows_LED,
            sources_T,
            others,
            num_rows,
            rows_LED.stride(0),
            D=width,
            BLOCK=min(_BLOCK, next_power_of_2(width)),
            num_warps=4,
            **overlapping(embeds_TD),
        )
    return embeds_TD, others


def scatter_rows(rows_LUD: Tensor, targets_U: Tensor, out_LED: Tensor) -> None:
    num_levels, num_units, width = rows_LUD.shape
    assert rows_LUD.stride()[1:] == out_LED.stride()[1:] == (width, 1), (rows_LUD.stride(), out_LED.stride())
    if num_units == 0:
        return
    grid = (num_units, num_levels, cdiv(width, _BLOCK))
    scatter_kernel[grid](
        rows_LUD,
        targets_U,
        out_LED,
        rows_LUD.stride(0),
        out_LED.stride(0),
        D=width,
        BLOCK=_BLOCK,
        num_warps=4,
    )


@Launcher
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


@Launcher
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
    """Program t: row t of x plus four weighted rows of the table. Indices and weights are (4, num_rows)."""
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


@Launcher
@triton.jit(do_not_specialize=("num_rows",))
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
    """Program (t, level, block): one block of the vision row for token t. Level 0 overwrites the embedding, unless t is
    text; the other levels go to `others`, which is zero for text."""
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


@Launcher
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
    """Program (u, level, block): copies one block of row u of a level to row targets[u]."""
    unit = tl.program_id(0).to(tl.int64)
    level = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < D
    target = tl.load(targets_ptr + unit).to(tl.int64)
    values = tl.load(rows_ptr + level * level_stride + unit * D + columns, mask=inside, other=0.0)
    tl.store(out_ptr + level * out_level_stride + target * D + columns, values, mask=inside)

"""Triton and cuBLAS versions of the kernels of vision towers, with the signatures of `reference_vision`."""

import torch
import triton
from torch import Tensor
from torch.nn import functional

from saccade.kernels.overlap import overlapping
from saccade.kernels.reference_vision import activate
from saccade.kernels.triton_vision import place_kernel, positions_kernel, rotate_kernel, scatter_kernel

_STRETCH = 2048
_HALF_DTYPES = (torch.float16, torch.bfloat16)


def rotate_packed(qkv_PX: Tensor, num_heads: int, cos_PK: Tensor, sin_PK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference_vision.rotate_packed`; in place, so that attention reads all three from one product."""
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
            HEADS_BLOCK=triton.next_power_of_2(2 * num_heads),
            HALF_BLOCK=triton.next_power_of_2(head_width // 2),
            num_warps=4,
            **overlapping(qkv_PX),
        )
    q_PHK, k_PHK, v_PHK = qkv_PX.view(num_rows, 3, num_heads, head_width).unbind(1)
    return q_PHK, k_PHK, v_PHK


def activated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """See `reference_vision.activated_linear`; cuBLAS applies bias and tanh-GELU where it has the sums in registers."""
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
            BLOCK=triton.next_power_of_2(width),
            num_warps=4,
        )
    return y_PD


def place_rows(embeds_TD: Tensor, rows_LED: Tensor, sources_T: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference_vision.place_rows`; in place."""
    num_levels, _, width = rows_LED.shape
    num_rows = embeds_TD.shape[0]
    assert embeds_TD.is_contiguous() and rows_LED.stride()[1:] == (width, 1), (embeds_TD.stride(), rows_LED.stride())
    others = torch.empty((num_levels - 1, num_rows, width), dtype=embeds_TD.dtype, device=embeds_TD.device)
    if num_rows:
        grid = (num_rows, num_levels, triton.cdiv(width, _STRETCH))
        place_kernel[grid](
            embeds_TD,
            rows_LED,
            sources_T,
            others,
            num_rows,
            rows_LED.stride(0),
            D=width,
            BLOCK=min(_STRETCH, triton.next_power_of_2(width)),
            num_warps=4,
            **overlapping(embeds_TD),
        )
    return embeds_TD, others


def scatter_rows(rows_LUD: Tensor, targets_U: Tensor, out_LED: Tensor) -> None:
    num_levels, num_units, width = rows_LUD.shape
    assert rows_LUD.stride()[1:] == out_LED.stride()[1:] == (width, 1), (rows_LUD.stride(), out_LED.stride())
    if num_units == 0:
        return
    grid = (num_units, num_levels, triton.cdiv(width, _STRETCH))
    scatter_kernel[grid](
        rows_LUD,
        targets_U,
        out_LED,
        rows_LUD.stride(0),
        out_LED.stride(0),
        D=width,
        BLOCK=_STRETCH,
        num_warps=4,
    )

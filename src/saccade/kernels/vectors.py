"""Products with one row (a decode step of a single request), bound by reading the weights once. `python -m
tests.gpu.profile_products` compares them with cuBLAS."""

import torch
import triton
from torch import Tensor

from saccade.kernels.overlap import overlapping
from saccade.kernels.triton_vectors import vector_kernel
from saccade.kernels.weight import BLOCK, Layout, Weight

_HALF = (torch.float16, torch.bfloat16)
_COLUMNS = 2  # per program: more would leave multiprocessors idle, one would read the row too often
_BLOCK = 4096
_NUM_WARPS = 4


def is_vector(x: Tensor, weight: Tensor) -> bool:
    """Whether `vector_linear` supports this product."""
    return x.shape[0] == 1 and x.dim() == 2 and x.dtype in _HALF and weight.is_contiguous() and weight.shape[1] % 8 == 0


def vector_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """See `reference.linear`."""
    y = torch.empty((1, weight.shape[0]), dtype=x.dtype, device=x.device) if out is None else out
    return _launch(x, weight, bias, y, is_gated=False)


def vector_gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    """See `reference.gated_linear`; SiLU only."""
    y = torch.empty((1, weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    return _launch(x, weight, None, y, is_gated=True)


def scaled_vector_linear(
    x: Tensor, weight: Weight, bias: Tensor | None, out: Tensor | None, *, is_gated: bool
) -> Tensor:
    """See `reference_scaled.row_linear` and `row_gated_linear`: numbers of one byte are read, and half the bytes."""
    width = weight.shape[0] // 2 if is_gated else weight.shape[0]
    y = torch.empty((1, width), dtype=weight.dtype, device=x.device) if out is None else out
    return _launch(x, weight.data, bias, y, is_gated=is_gated, scaled=weight)


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, *, is_gated: bool, scaled: Weight | None = None
) -> Tensor:
    assert x.stride(1) == 1 and y.stride(1) == 1, (x.stride(), y.stride())
    inner = weight.shape[1]
    scales = None if scaled is None else scaled.scales
    columns, num_warps = _COLUMNS, _NUM_WARPS
    has_row_scales = scaled is not None and scaled.layout is Layout.ROWS  # those of blocks would not fit into registers
    if has_row_scales and not is_gated and inner <= _BLOCK:  # the fastest on an H200, as everything here
        columns, num_warps = (4, 4) if y.shape[1] > _BLOCK else (2, 1)
    vector_kernel[(triton.cdiv(y.shape[1], columns),)](
        x,
        weight,
        weight if bias is None else bias,
        y,
        weight if scales is None else scales,
        y.shape[1],
        0 if scales is None else scales.stride(0),
        K=inner,
        SCALES=0 if scaled is None else 1 if scaled.layout is Layout.ROWS else 2,
        GATED=is_gated,
        HAS_BIAS=bias is not None,
        COLUMNS=columns,
        BLOCK=max(BLOCK, min(_BLOCK, triton.next_power_of_2(inner))),
        num_warps=num_warps,
        **overlapping(x),
    )
    return y

"""Products with one row, as in a decode step of a single request. Their time is the time to read the weights once.
See `tests.gpu.profile_products` for a comparison with cuBLAS, `tests.gpu.profile_single_rows` for a choice of tiles.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels.grids import cdiv, next_power_of_2
from saccade.kernels.overlap import overlapping
from saccade.kernels.triton_vectors import vector_kernel
from saccade.kernels.weight import BLOCK, Layout, Pending, Weight

_HALF = (torch.float16, torch.bfloat16)
_BLOCK = 4096
_WIDEST_NORM = 8192  # every program holds the whole row


class VectorTile(NamedTuple):
    """Each program computes `columns` results, from blocks of `block` columns of the weight at a time."""

    columns: int
    num_warps: int
    block: int


def is_vector(x: Tensor, weight: Tensor) -> bool:
    """Whether `vector_linear` supports this product."""
    return x.shape[0] == 1 and x.dim() == 2 and x.dtype in _HALF and weight.is_contiguous() and weight.shape[1] % 8 == 0


def is_vector_norm(pending: Pending, weight: Weight) -> bool:
    """Whether `pending_vector_linear` supports this product."""
    return is_vector(pending.x, weight.data) and weight.shape[1] <= _WIDEST_NORM


def vector_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """See `reference.linear`."""
    return _launch(x, Weight(weight, x.dtype), bias, out, is_gated=False)


def vector_gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    """See `reference.gated_linear`; SiLU only."""
    return _launch(x, Weight(weight, x.dtype), None, None, is_gated=True)


def scaled_vector_linear(
    x: Tensor, weight: Weight, bias: Tensor | None, out: Tensor | None, *, is_gated: bool
) -> Tensor:
    """See `reference_scaled.row_linear` and `row_gated_linear`. Reads half the bytes of a 16-bit weight."""
    return _launch(x, weight, bias, out, is_gated=is_gated)


def pending_vector_linear(
    pending: Pending, weight: Weight, bias: Tensor | None, out: Tensor | None, *, is_gated: bool
) -> Tensor:
    """See `reference_scaled.pending_linear`. Every program normalises the row itself, which beats a separate kernel."""
    return _launch(pending.x, weight, bias, out, is_gated=is_gated, pending=pending)


def tile_for(num_columns: int, inner: int, layout: Layout, *, is_gated: bool) -> VectorTile:
    """The fastest tile on an H200. With block scales, a larger tile would not fit into registers."""
    if layout is Layout.ROWS and not is_gated and inner <= _BLOCK:
        return VectorTile(4, 4, _BLOCK)
    return VectorTile(2, 4, _BLOCK)


def _launch(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    out: Tensor | None,
    *,
    is_gated: bool,
    pending: Pending | None = None,
) -> Tensor:
    (num_rows, inner), scales = weight.shape, weight.scales
    num_columns = num_rows // 2 if is_gated else num_rows
    y = torch.empty((1, num_columns), dtype=weight.dtype, device=x.device) if out is None else out
    assert x.stride(1) == 1 and y.stride(1) == 1, (x.stride(), y.stride())
    tile = tile_for(num_columns, inner, weight.layout, is_gated=is_gated)
    block = max(BLOCK, min(tile.block, next_power_of_2(inner)))
    if pending is not None:
        block = max(BLOCK, next_power_of_2(inner))
    residual = None if pending is None else pending.residual
    vector_kernel[(cdiv(num_columns, tile.columns),)](
        x,
        weight.data,
        weight.data if bias is None else bias,
        y,
        weight.data if scales is None else scales,
        x if residual is None else residual,
        x if pending is None else pending.weight,
        x if pending is None else pending.total,
        num_columns,
        0 if scales is None else scales.stride(0),
        0.0 if pending is None else pending.eps,
        0.0 if pending is None else pending.offset,
        K=inner,
        SCALES={Layout.PLAIN: 0, Layout.ROWS: 1, Layout.BLOCKS: 2}[weight.layout],
        GATED=is_gated,
        HAS_BIAS=bias is not None,
        NORMS=pending is not None,
        ADDS=residual is not None,
        COLUMNS=tile.columns,
        BLOCK=block,
        num_warps=tile.num_warps,
        **overlapping(x),
    )
    return y

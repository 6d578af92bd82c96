"""Products with e4m3 weights and of experts on a GPU, with the signatures of `reference_scaled`: torch's, and Triton's
around it and where torch has none that can be captured."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from saccade.errors import ConfigError
from saccade.kernels import fused, reference_scaled
from saccade.kernels.dispatch import gpu_for
from saccade.kernels.grids import cdiv, next_power_of_2
from saccade.kernels.overlap import overlapping
from saccade.kernels.reference_vision import ACTIVATIONS
from saccade.kernels.triton_scaled import grouped_kernel, narrow_kernel, scaled_norm_kernel, scaled_rows_kernel
from saccade.kernels.vectors import is_vector_norm, pending_vector_linear, scaled_vector_linear
from saccade.kernels.weight import BLOCK, E4M3, Layout, Pending, Scaled, Weight

_ALIGNED_ROWS = 4  # cuBLAS refuses block-scaled products with other numbers of rows
_MIN_ROWS_WITH_BIAS = 64  # rows from which on cuBLAS can add the bias itself
_FEW_ROWS = 64  # up to this, cuBLAS makes too few tiles to saturate memory bandwidth
_FEW_COLUMNS = 8192
_TILE_ROWS, _TILE_COLUMNS = 64, 128
_HOPPER, _BLACKWELL = 9, 10  # major numbers of compute capabilities; consumer cards with Blackwell have 12
_HOPPER_SHARED_BYTES = 227 * 1024


def scale_inputs(x: Tensor, weight: Weight) -> Scaled:
    return _scaled_rows(x, x.shape[-1], "none", weight)


def scaled_gated_activation(gate_up: Tensor, kind: str, feeds: Weight) -> Scaled:
    return _scaled_rows(gate_up, gate_up.shape[-1] // 2, f"gated_{_checked(kind)}", feeds)


def scaled_activation(x: Tensor, kind: str, feeds: Weight) -> Scaled:
    return _scaled_rows(x, x.shape[-1], _checked(kind), feeds)


def scaled_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, feeds: Weight, *, offset: float = 0.0
) -> tuple[Scaled, Tensor]:
    return _scaled_norm(x, residual, weight, None, eps, offset, feeds, centres=False)


def scaled_layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, feeds: Weight
) -> tuple[Scaled, Tensor]:
    return _scaled_norm(x, residual, weight, bias, eps, 0.0, feeds, centres=True)


def scaled_linear(x: Scaled, weight: Weight, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    assert weight.scales is not None
    num_rows, device = x.data.shape[0], x.data.device
    if not is_torch_product(num_rows, weight):
        if weight.layout is Layout.ROWS and num_rows <= _FEW_ROWS:
            return _narrow(x, weight, bias, out)
        return _grouped(x, weight, torch.full((1,), num_rows, dtype=torch.int32, device=device), bias, out)
    if weight.layout is Layout.ROWS:
        y = torch.empty((num_rows, weight.shape[0]), dtype=weight.dtype, device=device) if out is None else out
        fused = bias if num_rows >= _MIN_ROWS_WITH_BIAS else None
        torch._scaled_mm(
            x.data,
            weight.data.t(),
            x.scales,
            weight.scales.unsqueeze(0),
            fused,
            out_dtype=weight.dtype,
            use_fast_accum=True,
            out=y,
        )
        if bias is not None and fused is None:
            y += bias
        return y
    y = functional.scaled_mm(
        x.data,
        weight.data.t(),
        x.scales,
        functional.ScalingType.BlockWise1x128,
        _with_room(weight.scales).t(),
        functional.ScalingType.BlockWise128x128,
        output_dtype=weight.dtype,
    )
    if bias is not None:
        y += bias
    return y if out is None else out.copy_(y)


def is_torch_product(num_rows: int, weight: Weight) -> bool:
    """Whether `scaled_linear` leaves this product to torch, which refuses some shapes of block-scaled products, and all
    of them on other GPUs than Hopper. Before Hopper, its other product clears memory outside a capture (torch 2.11)."""
    major = _major(weight.data.device)
    if weight.layout is Layout.ROWS:
        return num_rows > _FEW_ROWS and major >= _HOPPER
    return major == _HOPPER and not (num_rows % _ALIGNED_ROWS or weight.shape[1] % BLOCK or weight.shape[0] % BLOCK)


def grouped_linear(x: Tensor, weight: Tensor, ends_E: Tensor) -> Tensor:
    """In other dtypes and on other GPUs, torch copies `ends_E` to the host, which no capture allows."""
    if x.dtype == torch.bfloat16 and _major(x.device) in (_HOPPER, _BLACKWELL):
        return reference_scaled.grouped_linear(x, weight, ends_E)
    return _grouped(Scaled(x, x), Weight(weight, weight.dtype), ends_E, None, None)


def scaled_grouped_linear(x: Scaled, weight: Weight, ends_E: Tensor) -> Tensor:
    return _grouped(x, weight, ends_E, None, None)


def row_linear(x: Tensor, weight: Weight, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    return scaled_vector_linear(x, weight, bias, out, is_gated=False)


def row_gated_linear(x: Tensor, weight: Weight) -> Tensor:
    return scaled_vector_linear(x, weight, None, None, is_gated=True)


def pending_linear(pending: Pending, weight: Weight, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    if is_vector_norm(pending, weight):
        return pending_vector_linear(pending, weight, bias, out, is_gated=False)
    row = pending.normed(fused.rms_norm, fused.add_rms_norm)
    return fused.linear(row, weight.data, bias, out) if weight.is_plain else row_linear(row, weight, bias, out)


def pending_gated_linear(pending: Pending, weight: Weight) -> Tensor:
    if is_vector_norm(pending, weight):
        return pending_vector_linear(pending, weight, None, None, is_gated=True)
    row = pending.normed(fused.rms_norm, fused.add_rms_norm)
    return fused.gated_linear(row, weight.data, "silu") if weight.is_plain else row_gated_linear(row, weight)


def _scaled_rows(x: Tensor, width: int, kind: str, weight: Weight) -> Scaled:
    x = x if x.stride(-1) == 1 else x.contiguous()
    found = _new_scaled(x.shape[0], width, weight)
    block, tail = _parts(width)
    if x.shape[0]:
        scaled_rows_kernel[(x.shape[0],)](
            x,
            found.data,
            found.scales,
            found.scales if weight.input_scale is None else weight.input_scale,
            width,
            x.stride(0),
            *found.scales.stride(),
            KIND=kind,
            GIVEN=weight.input_scale is not None,
            BLOCKS=weight.layout is Layout.BLOCKS,
            BLOCK=block,
            TAIL=tail,
            num_warps=min(8, max(2, block // 1024)),
            **overlapping(x),
        )
    return found


def _scaled_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    offset: float,
    feeds: Weight,
    *,
    centres: bool,
) -> tuple[Scaled, Tensor]:
    num_rows, width = x.shape
    assert x.stride(1) == 1 and (residual is None or residual.stride(1) == 1), "norms need contiguous rows"
    found = _new_scaled(num_rows, width, feeds)
    total = x if residual is None else torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    block, tail = _parts(width)
    if num_rows:
        scaled_norm_kernel[(num_rows,)](
            x,
            x if residual is None else residual,
            weight,
            weight if bias is None else bias,
            total,
            found.data,
            found.scales,
            found.scales if feeds.input_scale is None else feeds.input_scale,
            width,
            x.stride(0),
            x.stride(0) if residual is None else residual.stride(0),
            *found.scales.stride(),
            eps,
            offset,
            ADDS=residual is not None,
            CENTRES=centres,
            HAS_BIAS=bias is not None,
            GIVEN=feeds.input_scale is not None,
            BLOCKS=feeds.layout is Layout.BLOCKS,
            BLOCK=block,
            TAIL=tail,
            num_warps=min(8, max(2, block // 1024)),
            **overlapping(x),
        )
    return found, total


def _narrow(x: Scaled, weight: Weight, bias: Tensor | None, out: Tensor | None) -> Tensor:
    num_columns, inner = weight.shape
    y = torch.empty((x.data.shape[0], num_columns), dtype=weight.dtype, device=x.data.device) if out is None else out
    columns, block, stages = (32, 256, 6) if num_columns <= _FEW_COLUMNS else (64, 128, 4)  # fastest on an H200
    stage_bytes = (_FEW_ROWS + columns) * block
    narrow_kernel[(cdiv(num_columns, columns),)](
        x.data,
        x.scales,
        weight.data,
        weight.scales,
        y if bias is None else bias,
        y,
        x.data.shape[0],
        num_columns,
        y.stride(0),
        K=inner,
        HAS_BIAS=bias is not None,
        ROWS=_FEW_ROWS,
        COLUMNS=columns,
        BLOCK=block,
        num_warps=4,
        num_stages=min(stages, _shared_bytes(x.data.device) // stage_bytes),
        **overlapping(x.data),
    )
    return y


@lru_cache
def _major(device: torch.device) -> int:
    found = gpu_for(device)
    return _HOPPER if found is None else torch.cuda.get_device_capability(found)[0]


@lru_cache
def _shared_bytes(device: torch.device) -> int:
    """Shared memory of one program: 227 KiB on Hopper, 99 KiB on the smallest GPUs with e4m3."""
    found = gpu_for(device)
    if found is None:
        return _HOPPER_SHARED_BYTES
    properties: Any = torch.cuda.get_device_properties(found)  # the attribute is missing from torch's stubs
    return int(properties.shared_memory_per_block_optin)


def _grouped(x: Scaled, weight: Weight, ends_E: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """Plain weights take plain rows, and no scales are read."""
    num_rows, inner = x.data.shape
    num_columns, num_experts = weight.shape[-2], ends_E.shape[0]
    scales = weight.data if weight.scales is None else weight.scales
    device = x.data.device
    y = torch.empty((num_rows, num_columns), dtype=weight.dtype, device=device) if out is None else out
    grid = (cdiv(num_rows, _TILE_ROWS) + num_experts - 1, cdiv(num_columns, _TILE_COLUMNS))
    by_blocks = weight.layout is Layout.BLOCKS
    stage_bytes = (_TILE_ROWS + _TILE_COLUMNS) * BLOCK * x.data.itemsize
    grouped_kernel[grid](
        x.data,
        x.scales,
        weight.data,
        scales,
        y if bias is None else bias,
        ends_E,
        y,
        num_experts,
        num_columns,
        x.data.stride(0),
        *x.scales.stride(),
        scales.stride(0) if weight.data.dim() == 3 else 0,
        scales.stride(-2) if by_blocks else 0,
        y.stride(0),
        K=inner,
        HAS_BIAS=bias is not None,
        SCALED=not weight.is_plain,
        BLOCKS=by_blocks,
        EXPERTS=next_power_of_2(num_experts),
        ROWS=_TILE_ROWS,
        COLUMNS=_TILE_COLUMNS,
        num_warps=4,
        num_stages=max(1, min(4, _shared_bytes(device) // stage_bytes)),
    )
    return y


def _new_scaled(num_rows: int, width: int, weight: Weight) -> Scaled:
    """Uninitialised e4m3 rows, with scales laid out as cuBLAS reads them: block scales are column-major."""
    data = torch.empty((num_rows, width), dtype=E4M3, device=weight.data.device)
    if weight.layout is Layout.ROWS:
        return Scaled(data, torch.empty((num_rows, 1), device=data.device))
    return Scaled(data, torch.empty((-(-width // BLOCK), num_rows), device=data.device).t())


def _with_room(scales: Tensor) -> Tensor:
    """Block scales including the padding after each row, which cuBLAS expects as part of the shape."""
    return scales.as_strided((scales.shape[0], scales.stride(0)), scales.stride())


def _parts(width: int) -> tuple[int, int]:
    """Splits a row into a block and an optional tail, both powers of two, so that few lanes are idle."""
    whole = max(next_power_of_2(width), BLOCK)
    if width == whole or whole == BLOCK:
        return whole, 0
    tail = max(next_power_of_2(width - whole // 2), BLOCK)
    return (whole, 0) if tail == whole // 2 else (whole // 2, tail)


def _checked(kind: str) -> str:
    if kind not in ACTIVATIONS:
        raise ConfigError(f"unknown activation {kind!r}; allowed: {', '.join(ACTIVATIONS)}")
    return kind

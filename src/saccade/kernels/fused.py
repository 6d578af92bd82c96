"""Triton versions of the elementwise kernels, with the signatures of `saccade.kernels.reference`. Launches depend only
on shapes and strides, so they can be captured. Queries, keys and values may be slices of one fused projection: only
their last dimension must be contiguous."""

import torch
from torch import Tensor

from saccade.errors import ConfigError
from saccade.kernels import reference
from saccade.kernels.grids import cdiv, next_power_of_2
from saccade.kernels.overlap import overlapping
from saccade.kernels.reference_vision import ACTIVATIONS
from saccade.kernels.triton_fused import gated_kernel, newest_kernel, norm_kernel, rotary_kernel, tables_kernel
from saccade.kernels.vectors import is_vector, vector_gated_linear, vector_linear

_HEADS_PER_PROGRAM = 8
_BLOCK = 1024  # columns of one program of the elementwise kernels


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """cuBLAS, except for a single row."""
    if is_vector(x, weight):
        return vector_linear(x, weight, bias, out)
    return reference.linear(x, weight, bias, out)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    return _normalise(x, None, weight, None, eps, offset, centres=False)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    return _normalise(x, residual, weight, None, eps, offset, centres=False)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return _normalise(x, None, weight, bias, eps, 0.0, centres=True)[0]


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    return _normalise(x, residual, weight, bias, eps, 0.0, centres=True)


def gated_activation(gate_up: Tensor, kind: str) -> Tensor:
    if kind not in ACTIVATIONS:
        raise ConfigError(f"unknown activation {kind!r}; allowed: {', '.join(ACTIVATIONS)}")
    rows = _as_rows(gate_up)
    num_rows, width = rows.shape[0], rows.shape[1] // 2
    y = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows == 0:
        return y
    grid = (num_rows, cdiv(width, _BLOCK))
    gated_kernel[grid](rows, y, width, rows.stride(0), KIND=kind, BLOCK=_BLOCK, num_warps=4, **overlapping(rows))
    return y


def gated_linear(x: Tensor, weight: Tensor, kind: str) -> Tensor:
    if kind == "silu" and is_vector(x, weight):
        return vector_gated_linear(x, weight)
    return gated_activation(linear(x, weight), kind)


def newest_tokens(ids_T: Tensor, pending_T: Tensor, newest_S: Tensor) -> Tensor:
    num_rows = ids_T.shape[0]
    out = torch.empty(num_rows, dtype=torch.int64, device=ids_T.device)
    if num_rows:
        grid = (cdiv(num_rows, _BLOCK),)
        newest_kernel[grid](ids_T, pending_T, newest_S, out, num_rows, BLOCK=_BLOCK, num_warps=4, **overlapping(ids_T))
    return out


def rotary_tables(positions_AT: Tensor, axes_F: Tensor, frequencies_F: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, num_frequencies = positions_AT.shape[1], frequencies_F.shape[0]
    cos, sin = (torch.empty(num_rows, 2 * num_frequencies, device=positions_AT.device) for _ in range(2))
    block = next_power_of_2(num_frequencies)
    rows_per_program = max(1, _BLOCK // block)
    if num_rows:
        tables_kernel[(cdiv(num_rows, rows_per_program),)](
            positions_AT,
            axes_F,
            frequencies_F,
            cos,
            sin,
            num_rows,
            *positions_AT.stride(),
            F=num_frequencies,
            ROWS=rows_per_program,
            BLOCK=block,
            num_warps=4,
            **overlapping(positions_AT),
        )
    return cos, sin


def qk_norm_rotary_store(  # noqa: PLR0913
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos_TD: Tensor,
    sin_TD: Tensor,
    slots_T: Tensor,
    k_cache_NBGD: Tensor,
    v_cache_NBGD: Tensor,
    *,
    offset: float = 0.0,
) -> Tensor:
    """One launch for queries, keys and values."""
    num_rows, num_q_heads, head_width = q_THD.shape
    num_kv_heads, width = k_TGD.shape[1], cos_TD.shape[-1]
    q, k, v = (_last_contiguous(x) for x in (q_THD, k_TGD, v_TGD))
    q_out = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    if num_rows == 0:
        return q_out
    tiles = cdiv(num_q_heads, _HEADS_PER_PROGRAM) + 2 * cdiv(num_kv_heads, _HEADS_PER_PROGRAM)
    rotary_kernel[(num_rows, tiles)](
        q,
        k,
        v,
        q_out,
        k_cache_NBGD,
        v_cache_NBGD,
        q if q_weight is None else q_weight,  # the pointer is not read
        k if k_weight is None else k_weight,
        cos_TD,
        sin_TD,
        slots_T,
        num_q_heads,
        num_kv_heads,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        cos_TD.stride(0),
        sin_TD.stride(0),
        *k_cache_NBGD.stride()[:3],
        *v_cache_NBGD.stride()[:3],
        eps,
        offset,
        D=head_width,
        W=width,
        BLOCK_SIZE=k_cache_NBGD.shape[1],
        Q_NORM=q_weight is not None,
        K_NORM=k_weight is not None,
        HEADS=_HEADS_PER_PROGRAM,
        HALF_BLOCK=next_power_of_2(width // 2),
        REST_BLOCK=0 if width == head_width else next_power_of_2(head_width - width),
        D_BLOCK=next_power_of_2(head_width),
        num_warps=4,
        **overlapping(q),
    )
    return q_out


def _normalise(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    offset: float,
    *,
    centres: bool,
) -> tuple[Tensor, Tensor]:
    rows = _as_rows(x)
    added = rows if residual is None else _as_rows(residual)
    num_rows, width = rows.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = y if residual is None else torch.empty_like(y)
    if num_rows == 0:
        return y, total
    block = next_power_of_2(width)
    rows_per_program = max(1, _BLOCK // block)
    norm_kernel[(cdiv(num_rows, rows_per_program),)](
        rows,
        added,
        weight,
        weight if bias is None else bias,
        y,
        total,
        num_rows,
        width,
        rows.stride(0),
        added.stride(0),
        eps,
        offset,
        ADDS=residual is not None,
        CENTRES=centres,
        HAS_BIAS=bias is not None,
        ROWS=rows_per_program,
        BLOCK=block,
        num_warps=min(16, max(4, block // 512)),
        **overlapping(rows),
    )
    return y, total


def _as_rows(x: Tensor) -> Tensor:
    """Two dimensions, the last contiguous; a slice of a wider row stays a view."""
    return _last_contiguous(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]))


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()

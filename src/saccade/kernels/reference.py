"""Plain-torch oracles of every kernel: the CPU path, and the reference that GPU kernels are tested against.

T rows (packed tokens, padded), H query heads, G key/value heads, D head width, N blocks, B slots in a block, W rotated
columns, S sequences, A axes of a position, F frequencies. All compute in float32 and return the dtype of their input.
None reads a tensor on the host or derives a shape from data, so each can be recorded once and replayed on the same
storages with other contents.
"""

import torch
from torch import Tensor
from torch.nn import functional

from saccade.kernels.reference_attention import paged_attention, varlen_attention
from saccade.kernels.reference_vision import (
    activate,
    activated_linear,
    add_positions,
    place_rows,
    rotate,
    rotate_packed,
    scatter_rows,
)

__all__ = [
    "activated_linear",
    "add_layer_norm",
    "add_positions",
    "add_rms_norm",
    "gated_activation",
    "gated_linear",
    "layer_norm",
    "linear",
    "newest_tokens",
    "paged_attention",
    "place_rows",
    "qk_norm_rotary_store",
    "rms_norm",
    "rotary_tables",
    "rotate_packed",
    "scatter_rows",
    "varlen_attention",
]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x weight' + bias, written to `out` if given."""
    if out is None:
        return functional.linear(x, weight, bias)
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def gated_linear(x: Tensor, weight: Tensor, kind: str) -> Tensor:
    """`gated_activation` of x weight', which is [gate | up]. Implementations may or may not round the product first."""
    return gated_activation(functional.linear(x, weight), kind)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """x / rms(x) * (offset + weight)"""
    return _rms_norm_float(x, weight, eps, offset).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The norm of `x + residual` and that sum, rounded to the dtype of x before the norm reads it."""
    total = x + residual
    return rms_norm(total, weight, eps, offset=offset), total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    shift = None if bias is None else bias.float()
    return functional.layer_norm(x.float(), x.shape[-1:], weight.float(), shift, eps).to(x.dtype)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The norm of `x + residual` and that sum, rounded to the dtype of x before the norm reads it."""
    total = x + residual
    return layer_norm(total, weight, bias, eps), total


def gated_activation(gate_up: Tensor, kind: str) -> Tensor:
    """`activation(gate) * up` of rows laid out as [gate | up]; kind is one of `ACTIVATIONS`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (activate(gate, kind) * up).to(gate_up.dtype)


def newest_tokens(ids_T: Tensor, pending_T: Tensor, newest_S: Tensor) -> Tensor:
    """The token of each row: the newest one of sequence `pending_T[t]`, or `ids_T[t]` if that is negative."""
    return torch.where(pending_T < 0, ids_T.long(), newest_S[pending_T.clamp(min=0)])


def rotary_tables(positions_AT: Tensor, axes_F: Tensor, frequencies_F: Tensor) -> tuple[Tensor, Tensor]:
    """float32 cosines and sines (T, 2F), laid out for half-split rotation. Frequency f turns with row `axes_F[f]` of
    the positions."""
    angles_TF = positions_AT.index_select(0, axes_F).T.float() * frequencies_F
    angles_TD = torch.cat((angles_TF, angles_TF), dim=-1)
    return angles_TD.cos(), angles_TD.sin()


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
    """Applies an RMS norm to each head if its weight is given, then rotary, with no rounding in between. Returns the
    queries, and stores row t of the keys and values in slot `slots_T[t]` = block * B + position in the block.

    Rotary turns the pairs (i, i + W/2) of the first W columns of each head, where W is the width of cos and sin. These
    are laid out per column, with M-RoPE sections already resolved. Columns past W are unchanged.

    Padded rows share the slots of block 0, so its contents are undefined. Non-finite values are stored as 0. Fast
    attention kernels read whole tiles and give weight zero to slots past a request; 0 * NaN is NaN, so a NaN would
    reach the block's next owner. The request that produced it still sees it, through its keys.
    """
    q = q_THD.float() if q_weight is None else _rms_norm_float(q_THD, q_weight, eps, offset)
    k = k_TGD.float() if k_weight is None else _rms_norm_float(k_TGD, k_weight, eps, offset)
    k = rotate(k, cos_TD, sin_TD).to(k_TGD.dtype)
    block_size = k_cache_NBGD.shape[1]
    slots = slots_T.long()
    where = (slots // block_size, slots % block_size)
    k_cache_NBGD.index_put_(where, k.to(k_cache_NBGD.dtype))
    v_cache_NBGD.index_put_(where, v_TGD.to(v_cache_NBGD.dtype).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))
    return rotate(q, cos_TD, sin_TD).to(q_THD.dtype)


def _rms_norm_float(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight.float() + offset)

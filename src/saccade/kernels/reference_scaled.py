"""Plain-torch oracles of the kernels around weights in e4m3. See `saccade.kernels.reference` and `weight`.

They round where the GPU's kernels do: inputs to e4m3, sums in float32, and the result once.
"""

import torch
from torch import Tensor
from torch.nn import functional

from saccade.kernels import reference
from saccade.kernels.reference_vision import activate
from saccade.kernels.weight import Pending, Scaled, Weight, matrix_of, scale_inputs, unscaled


def scaled_linear(x: Scaled, weight: Weight, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x weight' + bias, written to `out` where a caller has a place for it."""
    return _hand_over(functional.linear(unscaled(x), matrix_of(weight), _float(bias)).to(weight.dtype), out)


def row_linear(x: Tensor, weight: Weight, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """The same for a single row, which is not rounded."""
    return _hand_over(functional.linear(x.float(), matrix_of(weight), _float(bias)).to(weight.dtype), out)


def row_gated_linear(x: Tensor, weight: Weight) -> Tensor:
    """silu(gate) * up of a single row's product with [gate | up]; each product is rounded first."""
    gate, up = row_linear(x, weight).float().chunk(2, dim=-1)
    return (activate(gate, "silu") * up).to(weight.dtype)


def pending_linear(pending: Pending, weight: Weight, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x weight' + bias of a row whose norm is pending: it is rounded as `rms_norm` rounds it."""
    row = pending.normed(reference.rms_norm, reference.add_rms_norm)
    if weight.is_plain:
        return reference.linear(row, weight.data, bias, out)
    return row_linear(row, weight, bias, out)


def pending_gated_linear(pending: Pending, weight: Weight) -> Tensor:
    """silu(gate) * up of such a row's product with [gate | up]."""
    row = pending.normed(reference.rms_norm, reference.add_rms_norm)
    return reference.gated_linear(row, weight.data, "silu") if weight.is_plain else row_gated_linear(row, weight)


def scaled_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, feeds: Weight, *, offset: float = 0.0
) -> tuple[Scaled, Tensor]:
    """`rms_norm` of `x + residual` as inputs of a weight, rounded to the dtype of x first; and that sum."""
    total = x if residual is None else x + residual
    wide = total.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (weight.float() + offset)
    return scale_inputs(y.to(x.dtype), feeds), total


def scaled_layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, feeds: Weight
) -> tuple[Scaled, Tensor]:
    """`layer_norm` of `x + residual` as inputs of a weight, rounded to the dtype of x first; and that sum."""
    total = x if residual is None else x + residual
    y = functional.layer_norm(total.float(), x.shape[-1:], weight.float(), _float(bias), eps)
    return scale_inputs(y.to(x.dtype), feeds), total


def scaled_gated_activation(gate_up: Tensor, kind: str, feeds: Weight) -> Scaled:
    """`gated_activation` as inputs of a weight, rounded to the dtype of the rows first."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return scale_inputs((activate(gate, kind) * up).to(gate_up.dtype), feeds)


def scaled_activation(x: Tensor, kind: str, feeds: Weight) -> Scaled:
    """An activation as inputs of a weight, rounded to the dtype of the rows first."""
    return scale_inputs(activate(x.float(), kind).to(x.dtype), feeds)


def grouped_linear(x: Tensor, weight: Tensor, ends_E: Tensor) -> Tensor:
    """Rows up to `ends_E[e]` times expert e's matrix, (E, N, K)."""
    return functional.grouped_mm(x, weight.transpose(1, 2), offs=ends_E)


def scaled_grouped_linear(x: Scaled, weight: Weight, ends_E: Tensor) -> Tensor:
    """`grouped_linear` of inputs and experts in e4m3."""
    return functional.grouped_mm(unscaled(x), matrix_of(weight).transpose(1, 2), offs=ends_E).to(weight.dtype)


def _float(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float()


def _hand_over(y: Tensor, out: Tensor | None) -> Tensor:
    return y if out is None else out.copy_(y)

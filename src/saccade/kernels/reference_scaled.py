"""Plain-torch oracles of the kernels for e4m3 weights. See `saccade.kernels.reference` and `weight`.

They round where the GPU kernels do: inputs to e4m3, and the float32 sum once at the end.
"""

import torch
from torch import Tensor
from torch.nn import functional

from saccade.kernels import reference
from saccade.kernels.reference_vision import activate
from saccade.kernels.weight import Pending, Scaled, Weight, matrix_of, scale_inputs, unscaled


def scaled_linear(x: Scaled, weight: Weight, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x weight' + bias, written to `out` if given."""
    return _copy_to(functional.linear(unscaled(x), matrix_of(weight), _float(bias)).to(weight.dtype), out)


def row_linear(x: Tensor, weight: Weight, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """`scaled_linear` of a single row, which is not rounded to e4m3."""
    return _copy_to(functional.linear(x.float(), matrix_of(weight), _float(bias)).to(weight.dtype), out)


def row_gated_linear(x: Tensor, weight: Weight) -> Tensor:
    """silu(gate) * up of a single row, where x weight' is [gate | up]. The product is rounded first."""
    gate, up = row_linear(x, weight).float().chunk(2, dim=-1)
    return (activate(gate, "silu") * up).to(weight.dtype)


def pending_linear(pending: Pending, weight: Weight, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x weight' + bias of a row whose norm is pending. The norm rounds its result as `rms_norm` does."""
    row = pending.normed(reference.rms_norm, reference.add_rms_norm)
    if weight.is_plain:
        return reference.linear(row, weight.data, bias, out)
    return row_linear(row, weight, bias, out)


def pending_gated_linear(pending: Pending, weight: Weight) -> Tensor:
    """silu(gate) * up of a row whose norm is pending, where x weight' is [gate | up]."""
    row = pending.normed(reference.rms_norm, reference.add_rms_norm)
    return reference.gated_linear(row, weight.data, "silu") if weight.is_plain else row_gated_linear(row, weight)


def scaled_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, feeds: Weight, *, offset: float = 0.0
) -> tuple[Scaled, Tensor]:
    """`rms_norm` of `x + residual`, rounded to the dtype of x and then scaled for the weight `feeds`; and the sum."""
    total = x if residual is None else x + residual
    wide = total.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (weight.float() + offset)
    return scale_inputs(y.to(x.dtype), feeds), total


def scaled_layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, feeds: Weight
) -> tuple[Scaled, Tensor]:
    """`layer_norm` of `x + residual`, rounded to the dtype of x and then scaled for the weight `feeds`; and the sum."""
    total = x if residual is None else x + residual
    y = functional.layer_norm(total.float(), x.shape[-1:], weight.float(), _float(bias), eps)
    return scale_inputs(y.to(x.dtype), feeds), total


def scaled_gated_activation(gate_up: Tensor, kind: str, feeds: Weight) -> Scaled:
    """`gated_activation`, rounded to the dtype of its input and then scaled for the weight `feeds`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return scale_inputs((activate(gate, kind) * up).to(gate_up.dtype), feeds)


def scaled_activation(x: Tensor, kind: str, feeds: Weight) -> Scaled:
    """An activation, rounded to the dtype of its input and then scaled for the weight `feeds`."""
    return scale_inputs(activate(x.float(), kind).to(x.dtype), feeds)


def grouped_linear(x: Tensor, weight: Tensor, ends_E: Tensor) -> Tensor:
    """Multiplies each expert's rows with its matrix of (E, N, K); the rows of expert e end before `ends_E[e]`."""
    if x.is_meta:  # where torch's product takes only bfloat16
        return x.new_empty(x.shape[0], weight.shape[1])
    return functional.grouped_mm(x, weight.transpose(1, 2), offs=ends_E)


def scaled_grouped_linear(x: Scaled, weight: Weight, ends_E: Tensor) -> Tensor:
    """`grouped_linear` with inputs and experts in e4m3."""
    return grouped_linear(unscaled(x), matrix_of(weight), ends_E).to(weight.dtype)


def _float(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float()


def _copy_to(y: Tensor, out: Tensor | None) -> Tensor:
    return y if out is None else out.copy_(y)

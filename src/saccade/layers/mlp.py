"""Feed-forward layers, gated and plain."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.nn import functional

from saccade.layers.layer import Layer, Placement
from saccade.layers.linear import RowLinear, column_linear, gate_up_linear

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPSpec:
    """`width` is the inner width."""

    width: int
    activation: str
    gated: bool = True
    bias: bool = False


def new_mlp(place: Placement, width: int, spec: MLPSpec) -> "GatedMLP | PlainMLP":
    return GatedMLP(place, width, spec) if spec.gated else PlainMLP(place, width, width, spec)


class GatedMLP(Layer):
    """down(activation(gate(x)) * up(x))"""

    def __init__(self, place: Placement, width: int, spec: MLPSpec) -> None:
        self.kernels = place.kernels
        self.activation = spec.activation
        self.gate_up = gate_up_linear(place, width, spec.width, bias=spec.bias)
        self.down = RowLinear(place, spec.width, width, bias=spec.bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.kernels.gated_activation(self.gate_up(x), self.activation))


class PlainMLP(Layer):
    """down(activation(up(x)))"""

    def __init__(self, place: Placement, fan_in: int, fan_out: int, spec: MLPSpec) -> None:
        self.activate = ACTIVATIONS[spec.activation]
        self.up = column_linear(place, fan_in, spec.width, bias=spec.bias)
        self.down = RowLinear(place, spec.width, fan_out, bias=spec.bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.activate(self.up(x)))

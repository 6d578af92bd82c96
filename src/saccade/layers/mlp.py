"""Feed-forward layers, gated and plain."""

from torch import Tensor

from saccade.layers.layer import Layer, Placement
from saccade.layers.layer_spec import MLPSpec
from saccade.layers.linear import RowLinear, column_linear, gate_up_linear


def new_mlp(place: Placement, width: int, spec: MLPSpec) -> "GatedMLP | PlainMLP":
    return GatedMLP(place, width, spec) if spec.gated else PlainMLP(place, width, width, spec)


class GatedMLP(Layer):
    """down(activation(gate(x)) * up(x))"""

    def __init__(self, place: Placement, width: int, spec: MLPSpec) -> None:
        self.kernels = place.kernels
        self.activation = spec.activation
        self.gate_up = gate_up_linear(place, width, spec.width, bias=spec.bias)
        self.down = RowLinear(place, spec.width, width, bias=spec.bias, has_room=True)

    def __call__(self, x: Tensor) -> Tensor:
        if self.gate_up.bias is None:
            return self.down(self.kernels.gated_linear(x, self.gate_up.weight, self.activation))
        return self.down(self.kernels.gated_activation(self.gate_up(x), self.activation))


class PlainMLP(Layer):
    """down(activation(up(x)))"""

    def __init__(self, place: Placement, fan_in: int, fan_out: int, spec: MLPSpec) -> None:
        self.kernels = place.kernels
        self.activation = spec.activation
        self.up = column_linear(place, fan_in, spec.width, bias=spec.bias)
        self.down = RowLinear(place, spec.width, fan_out, bias=spec.bias, has_room=True)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        inner = self.kernels.activated_linear(x, self.up.weight, self.up.bias, self.activation)
        return self.down(inner, out)

"""Feed-forward layers, gated and plain."""

from torch import Tensor

from saccade.kernels.weight import Inputs, Weight
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
        self.gate_up = gate_up_linear(place.inside("gate_up"), width, spec.width, bias=spec.bias)
        self.down = RowLinear(place.inside("down"), spec.width, width, bias=spec.bias, has_room=True)

    @property
    def fed(self) -> Weight:
        """The weight that multiplies the layer's inputs."""
        return self.gate_up.weight

    def __call__(self, x: Inputs) -> Tensor:
        feeds = self.down.weight
        if self.gate_up.bias is None:
            return self.down(self.kernels.multiply_gated(x, self.gate_up.weight, self.activation, feeds))
        return self.down(self.kernels.gated_inputs(self.gate_up(x), self.activation, feeds))


class PlainMLP(Layer):
    """down(activation(up(x)))"""

    def __init__(self, place: Placement, fan_in: int, fan_out: int, spec: MLPSpec) -> None:
        self.kernels = place.kernels
        self.activation = spec.activation
        self.up = column_linear(place.inside("up"), fan_in, spec.width, bias=spec.bias)
        self.down = RowLinear(place.inside("down"), spec.width, fan_out, bias=spec.bias, has_room=True)

    @property
    def fed(self) -> Weight:
        """The weight that multiplies the layer's inputs."""
        return self.up.weight

    def __call__(self, x: Inputs, out: Tensor | None = None) -> Tensor:
        up, feeds = self.up, self.down.weight
        return self.down(self.kernels.multiply_activated(x, up.weight, up.bias, self.activation, feeds), out)

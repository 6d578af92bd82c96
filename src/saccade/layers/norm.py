"""Norms, alone or fused with the residual addition before them."""

from collections.abc import Iterator

from torch import Tensor

from saccade.kernels.weight import Inputs, Weight
from saccade.layers.formats import Slot
from saccade.layers.layer import Layer, Placement
from saccade.layers.layer_spec import NormSpec

WEIGHT_STD = 0.05


def new_norm(place: Placement, width: int, spec: NormSpec) -> "RMSNorm | LayerNorm":
    return RMSNorm(place, width, spec) if spec.kind == "rms" else LayerNorm(place, width, spec)


class RMSNorm(Layer):
    def __init__(self, place: Placement, width: int, spec: NormSpec) -> None:
        self.kernels = place.kernels
        self.eps, self.offset = spec.eps, spec.offset
        self.weight = place.parameter(width)

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps, offset=self.offset)

    def carry(self, x: Tensor, residual: Tensor | None, feeds: Weight | None) -> tuple[Inputs, Tensor]:
        """The norm of `x + residual`, in the form that the weight `feeds` takes, and the sum, which is the next
        residual. Without a residual, the sum is x."""
        return self.kernels.rms_inputs(x, residual, self.weight, self.eps, feeds, offset=self.offset)

    def close(self, x: Tensor, residual: Tensor) -> Tensor:
        """The norm of `x + residual`."""
        return self.kernels.add_rms_norm(x, residual, self.weight, self.eps, offset=self.offset)[0]

    def own_slots(self) -> Iterator[tuple[str, Slot]]:
        shape = tuple(self.weight.shape)
        yield "weight", Slot(view=self.weight, shape=shape, mean=1.0 - self.offset, std=WEIGHT_STD)


class LayerNorm(Layer):
    def __init__(self, place: Placement, width: int, spec: NormSpec) -> None:
        self.kernels = place.kernels
        self.eps = spec.eps
        self.weight = place.parameter(width)
        self.bias = place.parameter(width)

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.layer_norm(x, self.weight, self.bias, self.eps)

    def carry(self, x: Tensor, residual: Tensor | None, feeds: Weight | None) -> tuple[Inputs, Tensor]:
        """See `RMSNorm.carry`."""
        return self.kernels.layer_inputs(x, residual, self.weight, self.bias, self.eps, feeds)

    def close(self, x: Tensor, residual: Tensor) -> Tensor:
        """See `RMSNorm.close`."""
        return self.kernels.add_layer_norm(x, residual, self.weight, self.bias, self.eps)[0]

    def own_slots(self) -> Iterator[tuple[str, Slot]]:
        shape = tuple(self.weight.shape)
        yield "weight", Slot(view=self.weight, shape=shape, mean=1.0, std=WEIGHT_STD)
        yield "bias", Slot(view=self.bias, shape=shape, std=WEIGHT_STD)

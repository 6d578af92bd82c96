"""Rotary angles, computed from position tensors.

A axes of a position (3 for M-RoPE, 2 for a patch grid), T rows, F frequencies, D = 2F rotated columns.

In every kind of rotary each frequency follows one axis of the position: axis 0 in plain rotary; time, height or width
in M-RoPE; row or column in a patch grid. No table is precomputed, so no prompt can outgrow it after a capture.
"""

import math

import torch
from torch import Tensor

from saccade.layers.layer import Layer, Placement
from saccade.layers.layer_spec import LinearScaling, Llama3Scaling, RotarySpec, YarnScaling, plain_axes


class Rotary(Layer):
    """Cosines and sines of positions in float32, laid out for half-split rotation. No checkpoint fills it, but graphs
    read its tensors, so it is a layer and watched like weights."""

    def __init__(self, place: Placement, spec: RotarySpec) -> None:
        self.kernels = place.kernels
        self.frequencies_F = inverse_frequencies(spec).to(place.device)
        self.axes_F = torch.tensor(spec.axes, device=place.device)

    def __call__(self, positions_AT: Tensor) -> tuple[Tensor, Tensor]:
        return self.kernels.rotary_tables(positions_AT, self.axes_F, self.frequencies_F)


class GridRotary(Rotary):
    """Half of the frequencies follow the row and half the column. Both halves begin with the highest frequency."""

    def __init__(self, place: Placement, head_dim: int, base: float) -> None:
        self.kernels = place.kernels
        half = RotarySpec(width=head_dim // 2, base=base, axes=plain_axes(head_dim // 2))
        self.frequencies_F = inverse_frequencies(half).repeat(2).to(place.device)
        self.axes_F = torch.arange(2, device=place.device).repeat_interleave(head_dim // 4)


def inverse_frequencies(spec: RotarySpec) -> Tensor:
    exponents = torch.arange(0, spec.width, 2, dtype=torch.float32) / spec.width
    plain = 1.0 / (spec.base**exponents)
    if spec.scaling is None:
        return plain
    if isinstance(spec.scaling, LinearScaling):
        return plain / spec.scaling.factor
    if isinstance(spec.scaling, YarnScaling):
        return _yarn(plain, spec)
    return _llama3(plain, spec.scaling)


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """`share` is the weight of the unscaled frequency: 1 for short wavelengths, 0 for long ones."""
    turns = scaling.original_max_position * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return share * plain + (1.0 - share) * plain / scaling.factor


def _yarn(plain: Tensor, spec: RotarySpec) -> Tensor:
    """Equation 13 of arXiv:2309.00071, with the bounds of transformers: whole indices, at least 0.001 apart."""
    scaling = spec.scaling
    assert isinstance(scaling, YarnScaling)
    bounds = [
        spec.width * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(spec.base))
        for turns in (scaling.fast_turns, scaling.slow_turns)
    ]
    low, high = (math.floor(bounds[0]), math.ceil(bounds[1])) if scaling.is_truncated else bounds
    low, high = max(low, 0), min(high, spec.width - 1)
    share = ((torch.arange(len(plain)) - low) / (high - low if high != low else 0.001)).clamp(0.0, 1.0)
    return share * plain / scaling.factor + (1.0 - share) * plain

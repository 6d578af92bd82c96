"""The parts of a vision tower. P patch rows, C values of a patch, D width, H heads of this rank, K columns of a head,
U merged units, S segments."""

from collections.abc import Iterator

import torch
from torch import Tensor

from saccade.errors import ConfigError
from saccade.kernels.weight import Inputs
from saccade.layers.formats import Slot
from saccade.layers.layer import Layer, Placement
from saccade.layers.layer_spec import MergerSpec, MLPSpec, PoolSpec, VisionBlockSpec
from saccade.layers.linear import Linear, QKVLinear, RowLinear
from saccade.layers.mlp import PlainMLP, new_mlp
from saccade.layers.norm import new_norm

# Boundaries, and the length of the longest segment. A segment is a frame or window; rows attend only within theirs.
Segments = tuple[Tensor, int]


class VisionBlock(Layer):
    """Pre-norm attention and MLP. Takes and returns (x, residual), whose sum is the hidden state."""

    def __init__(self, place: Placement, spec: VisionBlockSpec) -> None:
        self.attention_norm = new_norm(place, spec.width, spec.norm)
        self.attention = VisionAttention(place.inside("attention"), spec)
        self.mlp_norm = new_norm(place, spec.width, spec.norm)
        self.mlp = new_mlp(place.inside("mlp"), spec.width, spec.mlp)

    def __call__(
        self,
        x_PD: Tensor,
        residual_PD: Tensor | None,
        rotation: tuple[Tensor, Tensor] | None,
        segments: Segments,
    ) -> tuple[Tensor, Tensor]:
        inputs, residual_PD = self.attention_norm.carry(x_PD, residual_PD, self.attention.qkv.weight)
        x_PD = self.attention(inputs, rotation, segments)
        inputs, residual_PD = self.mlp_norm.carry(x_PD, residual_PD, self.mlp.fed)
        return self.mlp(inputs), residual_PD


class VisionAttention(Layer):
    def __init__(self, place: Placement, spec: VisionBlockSpec) -> None:
        self.kernels = place.kernels
        head_dim = spec.width // spec.num_heads
        self.scale = head_dim**-0.5
        heads = {"num_heads": spec.num_heads, "num_kv_heads": spec.num_heads, "head_dim": head_dim}
        self.qkv = QKVLinear(place.inside("qkv"), spec.width, bias=True, what="vision ", **heads)
        self.out = RowLinear(place.inside("out"), spec.width, spec.width, bias=True)
        if self.qkv.has_room:
            raise ConfigError(
                f"{place.path}: heads of {spec.num_heads} x {head_dim} columns do not fill the blocks that are scaled "
                f"together; use a checkpoint whose vision encoder is not quantised by blocks"
            )

    def __call__(self, x_PD: Inputs, rotation: tuple[Tensor, Tensor] | None, segments: Segments) -> Tensor:
        if rotation is None:
            q_PHK, k_PHK, v_PHK = self.qkv.heads(x_PD)
        else:
            q_PHK, k_PHK, v_PHK = self.kernels.rotate_packed(self.qkv(x_PD), self.qkv.num_heads, *rotation)
        o_PHK = self.kernels.varlen_attention(q_PHK, k_PHK, v_PHK, *segments, scale=self.scale)
        return self.out(o_PHK.reshape(q_PHK.shape[0], -1))


class PositionGrid(Layer):
    """A square grid of learned positions, interpolated from four neighbours. The host computes indices and weights from
    each image's grid, so eager and captured passes use the same values."""

    def __init__(self, place: Placement, side: int, width: int) -> None:
        self.kernels = place.kernels
        self.weight = place.parameter(side * side, width)

    def __call__(self, x_PD: Tensor, indices_4P: Tensor, weights_4P: Tensor) -> Tensor:
        return self.kernels.add_positions(x_PD, self.weight, indices_4P, weights_4P)

    def own_slots(self) -> Iterator[tuple[str, Slot]]:
        yield "weight", Slot(view=self.weight, shape=tuple(self.weight.shape), std=0.1)


class Merger(Layer):
    def __init__(self, place: Placement, width: int, unit: int, spec: MergerSpec) -> None:
        self.joined = width * unit
        self.norm_after_merge = spec.norm_after_merge
        self.norm = new_norm(place, self.joined if spec.norm_after_merge else width, spec.norm)
        mlp = MLPSpec(width=self.joined, activation="gelu", gated=False, bias=True)
        self.mlp = PlainMLP(place.inside("mlp"), self.joined, spec.out_width, mlp)

    def __call__(self, x_PD: Tensor, out_UE: Tensor | None = None) -> Tensor:
        if self.norm_after_merge:
            return self.mlp(self.norm(x_PD.view(-1, self.joined)), out_UE)
        return self.mlp(self.norm(x_PD).view(-1, self.joined), out_UE)


class PoolProjector(Layer):
    def __init__(self, place: Placement, width: int, unit: int, spec: PoolSpec) -> None:
        self.unit = unit
        self.norm = new_norm(place, width, spec.norm)
        self.project = Linear(place.inside("project"), width, spec.out_width)

    def __call__(self, x_PD: Tensor, out_UE: Tensor | None = None) -> Tensor:
        pooled_UD = x_PD.unflatten(0, (-1, self.unit)).mean(dim=1, dtype=torch.float32).to(x_PD.dtype)
        return self.project(self.norm(pooled_UD), out_UE)

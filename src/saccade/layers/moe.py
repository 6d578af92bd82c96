"""A mixture of experts whose shapes do not depend on the routing.

T rows, N experts, A = T * top_k assignments, D width, F inner width of an expert on this rank.

Assignments are sorted by expert, and a grouped matrix product runs over the sorted rows with the experts' ends as a
tensor: always A rows of work, nothing dropped or padded, so it can be captured.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from saccade.errors import ConfigError
from saccade.kernels.weight import Inputs
from saccade.layers.formats import Slot
from saccade.layers.layer import Layer, Placement
from saccade.layers.layer_spec import MoESpec
from saccade.layers.linear import Linear


class MoE(Layer):
    fed = None  # the router reads the inputs, too, and needs them unscaled

    def __init__(self, place: Placement, width: int, spec: MoESpec) -> None:
        self.spec = spec
        self.router = Linear(place.inside("router"), width, spec.num_experts)
        self.experts = Experts(place.inside("experts"), width, spec)

    def __call__(self, x_TD: Inputs) -> Tensor:
        assert isinstance(x_TD, Tensor), "a router needs unscaled inputs"
        weights_TN = torch.softmax(self.router(x_TD), dim=-1, dtype=torch.float32)
        weights_TA, experts_TA = weights_TN.topk(self.spec.top_k, dim=-1, sorted=False)
        if self.spec.renormalise:
            weights_TA = weights_TA / weights_TA.sum(dim=-1, keepdim=True)
        return self.experts(x_TD, experts_TA, weights_TA)


class Experts(Layer):
    """Every rank holds a shard of every expert, padded as in `linear`; an all-reduce adds the results."""

    def __init__(self, place: Placement, width: int, spec: MoESpec) -> None:
        self.kernels, self.group, self.spec = place.kernels, place.group, spec
        formats = place.formats
        self.start, self.count, room = place.group.spread(spec.width, "expert width", multiple=formats.multiple)
        self.room = formats.room(room)
        self.gate_up, self.format = place.weight(spec.num_experts, 2 * self.room, width, part="0.gate")
        self.down, self.down_format = place.weight(spec.num_experts, width, self.room, part="0.down")
        self._check_forms(place)
        self.ids_N = torch.arange(spec.num_experts, device=place.device)

    def __call__(self, x_TD: Tensor, experts_TA: Tensor, weights_TA: Tensor) -> Tensor:
        top_k = experts_TA.shape[1]
        sorted_A, order_A = experts_TA.flatten().sort(stable=True)
        ends_N = torch.searchsorted(sorted_A, self.ids_N, right=True, out_int32=True)
        hidden_AF = self.kernels.multiply_grouped(x_TD[order_A // top_k], self.gate_up, ends_N)
        inner_AF = self.kernels.gated_inputs(hidden_AF, self.spec.activation, self.down)
        sorted_AD = self.kernels.multiply_grouped(inner_AF, self.down, ends_N)
        y_TAD = torch.empty_like(sorted_AD).index_copy_(0, order_A, sorted_AD).unflatten(0, (-1, top_k))
        y_TD = (y_TAD * weights_TA.unsqueeze(-1)).sum(dim=1).to(x_TD.dtype)
        return self.group.all_reduce(y_TD)

    def own_slots(self) -> Iterator[tuple[str, Slot]]:
        count, width = self.count, self.down.shape[1]
        shape, std = (self.spec.width, width), width**-0.5
        for i, (gate_up, down) in enumerate(zip(self.gate_up.experts(), self.down.experts(), strict=True)):
            parts = (
                ("gate", self.format.slots(gate_up.rows(0, count), shape, dim=0, start=self.start, std=std)),
                ("up", self.format.slots(gate_up.rows(self.room, count), shape, dim=0, start=self.start, std=std)),
                (
                    "down",
                    self.down_format.slots(
                        down.columns(count), shape[::-1], dim=1, start=self.start, std=self.spec.width**-0.5
                    ),
                ),
            )
            for part, slots in parts:
                yield from ((f"{i}.{part}.{name}", slot) for name, slot in slots)

    def _check_forms(self, place: Placement) -> None:
        """All experts are one product, so they must have the same format."""
        for i in range(self.spec.num_experts):
            for part, form in (("gate", self.format), ("up", self.format), ("down", self.down_format)):
                if place.formats.of(f"{place.path}.{i}.{part}") != form:
                    raise ConfigError(
                        f"{place.path}: expert {i} is not quantised like expert 0, but all experts are computed as one "
                        f"product; use a checkpoint that quantises all experts of a layer or none"
                    )

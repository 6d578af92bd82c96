"""A mixture of experts whose shapes do not depend on the routing.

T rows, N experts, A = T * top_k assignments, D width, F inner width of an expert on this rank.

Assignments are sorted by expert, and a grouped matrix product runs over the sorted rows with the experts' ends as a
tensor: always A rows of work, nothing dropped or padded, so it can be captured.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from saccade.layers.layer import Layer, Placement, Slot
from saccade.layers.layer_spec import MoESpec
from saccade.layers.linear import Linear, with_room


class MoE(Layer):
    def __init__(self, place: Placement, width: int, spec: MoESpec) -> None:
        self.spec = spec
        self.router = Linear(place, width, spec.num_experts)
        self.experts = Experts(place, width, spec)

    def __call__(self, x_TD: Tensor) -> Tensor:
        weights_TN = torch.softmax(self.router(x_TD), dim=-1, dtype=torch.float32)
        weights_TA, experts_TA = weights_TN.topk(self.spec.top_k, dim=-1)
        if self.spec.renormalise:
            weights_TA = weights_TA / weights_TA.sum(dim=-1, keepdim=True)
        return self.experts(x_TD, experts_TA, weights_TA)


class Experts(Layer):
    """Every rank holds a shard of every expert, padded as in `linear`; an all-reduce adds the results."""

    def __init__(self, place: Placement, width: int, spec: MoESpec) -> None:
        self.kernels, self.group, self.spec = place.kernels, place.group, spec
        self.start, self.count, room = place.group.spread(spec.width, "expert width")
        self.gate_up = place.parameter(spec.num_experts, 2 * with_room(room), width)
        self.down = place.parameter(spec.num_experts, width, with_room(room))
        self.ids_N = torch.arange(spec.num_experts, device=place.device)

    def __call__(self, x_TD: Tensor, experts_TA: Tensor, weights_TA: Tensor) -> Tensor:
        top_k = experts_TA.shape[1]
        sorted_A, order_A = experts_TA.flatten().sort(stable=True)
        ends_N = torch.searchsorted(sorted_A, self.ids_N, right=True).to(torch.int32)
        hidden_AF = grouped_mm(x_TD[order_A // top_k], self.gate_up.transpose(1, 2), offs=ends_N)
        hidden_AF = self.kernels.gated_activation(hidden_AF, self.spec.activation)
        sorted_AD = grouped_mm(hidden_AF, self.down.transpose(1, 2), offs=ends_N)
        y_TAD = sorted_AD[order_A.argsort()].unflatten(0, (-1, top_k))
        y_TD = (y_TAD * weights_TA.unsqueeze(-1)).sum(dim=1).to(x_TD.dtype)
        return self.group.all_reduce(y_TD)

    def own_slots(self) -> Iterator[tuple[str, Slot]]:
        count, (width, room) = self.count, self.down.shape[1:]
        shape, shard = (self.spec.width, width), {"dim": 0, "start": self.start}
        for i, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            yield f"{i}.gate.weight", Slot(view=gate_up[:count], shape=shape, std=width**-0.5, **shard)
            yield f"{i}.up.weight", Slot(view=gate_up[room : room + count], shape=shape, std=width**-0.5, **shard)
            shard_in, std = {"dim": 1, "start": self.start}, self.spec.width**-0.5
            yield f"{i}.down.weight", Slot(view=down[:, :count], shape=shape[::-1], std=std, **shard_in)

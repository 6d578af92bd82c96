"""The mixture of experts against a loop over tokens."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from saccade.kernels.dispatch import kernels_for
from saccade.layers.layer import Placement
from saccade.layers.layer_spec import MoESpec
from saccade.layers.moe import MoE
from saccade.models.dummy import fill_with_noise

CPU = torch.device("cpu")
WIDTH = 24


def new_moe(*, renormalise: bool = True, num_experts: int = 5, top_k: int = 2) -> MoE:
    place = Placement(kernels=kernels_for(CPU, torch.float32), device=CPU, dtype=torch.float32)
    spec = MoESpec(num_experts=num_experts, top_k=top_k, width=16, activation="silu", renormalise=renormalise)
    moe = MoE(place, WIDTH, spec)
    fill_with_noise(moe, seed=3)
    return moe


def one_by_one(moe: MoE, x_TD: Tensor) -> Tensor:
    rows = []
    for x_D in x_TD:
        weights, chosen = torch.softmax(moe.router(x_D), dim=-1).topk(moe.spec.top_k)
        if moe.spec.renormalise:
            weights = weights / weights.sum()
        row = torch.zeros_like(x_D)
        for weight, expert in zip(weights, chosen.tolist(), strict=True):
            gate, up = (moe.experts.gate_up.data[expert] @ x_D).chunk(2)
            row += weight * (moe.experts.down.data[expert] @ (silu(gate) * up))
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("num_rows", [1, 2, 33])
def test_experts_match_a_loop(num_rows: int, renormalise: bool) -> None:
    moe = new_moe(renormalise=renormalise)
    x_TD = torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(num_rows))
    torch.testing.assert_close(moe(x_TD), one_by_one(moe, x_TD), atol=1e-5, rtol=1e-5)


def test_all_rows_may_choose_one_expert_and_leave_the_others_empty() -> None:
    moe = new_moe(top_k=1)
    x_TD = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(0)).repeat(9, 1)
    torch.testing.assert_close(moe(x_TD), one_by_one(moe, x_TD), atol=1e-5, rtol=1e-5)


def test_poisoned_rows_do_not_affect_others() -> None:
    moe = new_moe()
    x_TD = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(1))
    poisoned = torch.cat([x_TD[:3], torch.full((4, WIDTH), float("nan")), x_TD[3:]])
    y_TD = moe(poisoned)
    others = torch.cat([y_TD[:3], y_TD[7:]])
    torch.testing.assert_close(others, one_by_one(moe, x_TD), atol=1e-5, rtol=1e-5)

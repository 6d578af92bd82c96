"""Fused and sharded layers put the rows of checkpoint tensors where they belong."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from saccade.errors import ConfigError
from saccade.kernels.dispatch import kernels_for
from saccade.layers.layer import Layer, Placement
from saccade.layers.layer_spec import MLPSpec
from saccade.layers.linear import QKVLinear, RowLinear, gate_up_linear
from saccade.layers.mlp import new_mlp
from saccade.layers.parallel import ParallelGroup
from saccade.layers.vocabulary import VocabTable

CPU = torch.device("cpu")


def place(rank: int = 0, size: int = 1) -> Placement:
    group = ParallelGroup(rank=rank, size=size)
    return Placement(kernels=kernels_for(CPU, torch.float32), device=CPU, dtype=torch.float32, group=group)


def random_tensors(layer: Layer, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(slot.shape, generator=generator) for name, slot in layer.slots()}


def filled(layer: Layer, tensors: dict[str, Tensor]) -> None:
    for name, slot in layer.slots():
        slot.fill(tensors[name])


def test_a_fused_product_equals_the_products_of_its_parts() -> None:
    layer = QKVLinear(place(), 12, num_heads=4, num_kv_heads=2, head_dim=8, bias=True)
    tensors = random_tensors(layer)
    assert set(tensors) == {f"{p}.{w}" for p in "qkv" for w in ("weight", "bias")}
    filled(layer, tensors)
    x_TD = torch.randn(5, 12, generator=torch.Generator().manual_seed(1))
    for name, heads, part in zip("qkv", (4, 2, 2), layer.heads(x_TD), strict=True):
        expected = linear(x_TD, tensors[f"{name}.weight"], tensors[f"{name}.bias"])
        torch.testing.assert_close(part, expected.view(5, heads, 8))


def test_ranks_hold_whole_heads_and_share_key_heads_if_there_are_too_few() -> None:
    whole = QKVLinear(place(), 12, num_heads=8, num_kv_heads=2, head_dim=4)
    tensors = random_tensors(whole)
    filled(whole, tensors)
    x_TD = torch.randn(3, 12, generator=torch.Generator().manual_seed(2))
    q_THK, k_TGK, v_TGK = whole.heads(x_TD)
    for rank in range(4):
        layer = QKVLinear(place(rank, 4), 12, num_heads=8, num_kv_heads=2, head_dim=4)
        filled(layer, tensors)
        q, k, v = layer.heads(x_TD)
        torch.testing.assert_close(q, q_THK[:, 2 * rank : 2 * rank + 2])
        torch.testing.assert_close(k, k_TGK[:, rank // 2 : rank // 2 + 1])
        torch.testing.assert_close(v, v_TGK[:, rank // 2 : rank // 2 + 1])


def test_gate_and_up_are_split_alike() -> None:
    whole = gate_up_linear(place(), 6, 32, bias=True)
    tensors = random_tensors(whole)
    for rank in (0, 1):
        layer = gate_up_linear(place(rank, 2), 6, 32, bias=True)
        filled(layer, tensors)
        rows = slice(16 * rank, 16 * rank + 16)
        assert torch.equal(layer.weight.data, torch.cat([tensors["gate.weight"][rows], tensors["up.weight"][rows]]))


@pytest.mark.parametrize(
    ("width", "num_ranks"), [(20, 1), (63, 1), (65, 1), (128, 1), (20, 2), (130, 2), (128, 2), (65, 4)]
)
@pytest.mark.parametrize("is_gated", [True, False])
def test_padding_between_layers_changes_no_sum(width: int, is_gated: bool, num_ranks: int) -> None:
    spec = MLPSpec(width=width, activation="silu", gated=is_gated, bias=True)
    tensors = random_tensors(new_mlp(place(), 24, spec))
    x_TD = torch.randn(5, 24, generator=torch.Generator().manual_seed(4))
    found = torch.zeros(5, 24)
    for rank in range(num_ranks):
        layer = new_mlp(place(rank, num_ranks), 24, spec)
        filled(layer, tensors)
        inner = layer.down.weight.shape[1]
        assert inner % 16 == 0 and inner - width / num_ranks < 64
        found += layer(x_TD)
    names = ("gate_up.gate", "gate_up.up") if is_gated else ("up",)
    parts = [linear(x_TD, tensors[f"{name}.weight"], tensors.get(f"{name}.bias")) for name in names]
    middle = silu(parts[0]) * (parts[1] if is_gated else 1.0)
    right = linear(middle, tensors["down.weight"], tensors.get("down.bias"))
    torch.testing.assert_close(found, right, rtol=0, atol=1e-5 * float(right.abs().max()))


def test_the_bias_of_a_row_layer_is_added_once() -> None:
    tensors = random_tensors(RowLinear(place(), 8, 5, bias=True))
    x_TD = torch.randn(3, 8, generator=torch.Generator().manual_seed(3))
    partial = []
    for rank in (0, 1):
        layer = RowLinear(place(rank, 2), 8, 5, bias=True)
        filled(layer, tensors)
        partial.append(layer(x_TD[:, 4 * rank : 4 * rank + 4]))
    expected = linear(x_TD, tensors["weight"], tensors["bias"])
    torch.testing.assert_close(partial[0] + partial[1], expected)


def test_a_vocabulary_that_does_not_divide_evenly_ends_in_padding() -> None:
    tensors = random_tensors(VocabTable(place(), 37, 4))
    ids_T = torch.tensor([0, 36, 3, 16, 2])
    rows, logits = torch.zeros(5, 4), []
    for rank in range(4):
        table = VocabTable(place(rank, 4), 37, 4)
        filled(table, tensors)
        rows += table.rows(ids_T)
        logits.append(linear(torch.ones(1, 4), table.weight.data))
    assert torch.equal(rows, tensors["weight"][ids_T])
    torch.testing.assert_close(torch.cat(logits, dim=-1)[:, :37], linear(torch.ones(1, 4), tensors["weight"]))


def test_a_tensor_of_the_wrong_shape_is_refused() -> None:
    layer = gate_up_linear(place(), 6, 8)
    slot = dict(layer.slots())["gate.weight"]
    with pytest.raises(AssertionError, match="is 8x5; 8x6 is needed"):
        slot.fill(torch.ones(8, 5))


def test_heads_that_do_not_divide_evenly_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_kv_heads = 3 cannot be split evenly over 4 ranks"):
        QKVLinear(place(1, 4), 12, num_heads=8, num_kv_heads=3, head_dim=4)

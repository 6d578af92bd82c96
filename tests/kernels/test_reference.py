"""The oracles against torch's own functions and the formulas of transformers."""

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from saccade.kernels import reference
from tests.kernels.cases import qkv_slices, randn, rotary_tables, turned


def test_rms_norm_matches_qwen_and_with_an_offset_gemma() -> None:
    x, weight = randn(4, 3, 72, seed=1) * 5, randn(72, seed=2)
    qwen, gemma = Qwen3RMSNorm(72, eps=1e-3), Gemma3RMSNorm(72, eps=1e-3)
    qwen.weight.data, gemma.weight.data = weight, weight
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-3), qwen(x))
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-3, offset=1.0), gemma(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adding_norms_return_the_sum_they_normalised(dtype: torch.dtype) -> None:
    x, residual = randn(5, 80, seed=3, dtype=dtype), randn(5, 80, seed=4, dtype=dtype)
    weight, bias = randn(80, seed=5, dtype=dtype), randn(80, seed=6, dtype=dtype)
    for (y, total), norm in (
        (reference.add_rms_norm(x, residual, weight, 1e-6), reference.rms_norm(x + residual, weight, 1e-6)),
        (
            reference.add_layer_norm(x, residual, weight, bias, 1e-6),
            nn.functional.layer_norm((x + residual).float(), (80,), weight.float(), bias.float(), 1e-6).to(dtype),
        ),
    ):
        assert torch.equal(total, x + residual)
        assert torch.equal(y, norm)


def test_gated_activations() -> None:
    x = randn(3, 2 * 50, seed=7)
    gate, up = x[:, :50], x[:, 50:]
    torch.testing.assert_close(reference.gated_activation(x, "silu"), gate / (1 + torch.exp(-gate)) * up)
    torch.testing.assert_close(reference.gated_activation(x, "gelu"), nn.GELU()(gate) * up)
    torch.testing.assert_close(reference.gated_activation(x, "gelu_tanh"), nn.GELU(approximate="tanh")(gate) * up)
    torch.testing.assert_close(reference.gated_activation(x, "quick_gelu"), ACT2FN["quick_gelu"](gate) * up)


def test_rotary_matches_transformers() -> None:
    q, k, _ = qkv_slices(6, 4, 2, 64, seed=8)
    cos, sin = rotary_tables(6, 64, seed=9)
    theirs = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None])
    ours = turned(reference, q, k, cos, sin)
    torch.testing.assert_close(ours[0], theirs[0][0].transpose(0, 1))
    torch.testing.assert_close(ours[1], theirs[1][0].transpose(0, 1))


def test_partial_rotary_leaves_the_rest_of_each_head() -> None:
    q, k, _ = qkv_slices(6, 4, 2, 64, seed=10)
    cos, sin = rotary_tables(6, 16, seed=11)
    q_turned, k_turned = turned(reference, q, k, cos, sin)
    whole = turned(reference, q[..., :16], k[..., :16], cos, sin)
    assert torch.equal(q_turned[..., 16:], q[..., 16:])
    assert torch.equal(q_turned[..., :16], whole[0])
    assert torch.equal(k_turned[..., :16], whole[1])


def test_norm_rotary_store_equals_its_three_steps() -> None:
    q, k, v = qkv_slices(4, 6, 2, 32, seed=12)
    cos, sin = rotary_tables(4, 32, seed=13)
    q_weight, k_weight = randn(32, seed=14), randn(32, seed=15)
    slots = torch.tensor([6, 1, 4 * 3, 4 * 2 + 3], dtype=torch.int32)
    caches = [randn(5, 4, 2, 32, seed=s) for s in (16, 17)]
    before = [x.clone() for x in caches]
    q_out = reference.qk_norm_rotary_store(q, k, v, q_weight, k_weight, 1e-6, cos, sin, slots, *caches, offset=1.0)
    q_normed = reference.rms_norm(q, q_weight, 1e-6, offset=1.0)
    k_normed = reference.rms_norm(k, k_weight, 1e-6, offset=1.0)
    q_expected, k_expected = turned(reference, q_normed, k_normed, cos, sin)
    torch.testing.assert_close(q_out, q_expected)
    for cache, old, rows in ((caches[0], before[0], k_expected), (caches[1], before[1], v)):
        for block in range(5):
            for place in range(4):
                written = (slots == block * 4 + place).nonzero().flatten().tolist()
                expected = rows[written[0]] if written else old[block, place]
                torch.testing.assert_close(cache[block, place], expected)

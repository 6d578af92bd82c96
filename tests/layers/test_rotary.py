"""Rotary angles against their definitions, and against transformers where the formula is long."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from saccade.kernels.dispatch import kernels_for
from saccade.layers.layer import Placement
from saccade.layers.layer_spec import (
    LinearScaling,
    Llama3Scaling,
    RotarySpec,
    interleaved_axes,
    plain_axes,
    sectioned_axes,
)
from saccade.layers.rotary import GridRotary, Rotary, inverse_frequencies

CPU = torch.device("cpu")
PLACE = Placement(kernels=kernels_for(CPU, torch.float32), device=CPU, dtype=torch.float32)


def test_axes_of_qwen2_5_vl_come_in_sections() -> None:
    assert sectioned_axes((2, 3, 1)) == (0, 0, 1, 1, 1, 2)


def test_axes_of_qwen3_vl_take_turns_and_time_takes_the_rest() -> None:
    assert interleaved_axes((4, 2, 2)) == (0, 1, 2, 0, 1, 2, 0, 0)
    axes = interleaved_axes((24, 20, 20))
    assert [axes.count(axis) for axis in range(3)] == [24, 20, 20]
    assert axes[:6] == (0, 1, 2, 0, 1, 2) and axes[60:] == (0, 0, 0, 0)


def test_each_frequency_follows_its_axis() -> None:
    spec = RotarySpec(width=8, base=100.0, axes=(0, 1, 2, 0))
    positions_3T = torch.tensor([[5, 1], [7, 2], [11, 3]])
    cos, sin = Rotary(PLACE, spec)(positions_3T)
    frequencies = 100.0 ** (-torch.arange(4) / 4)
    angles = torch.stack([positions_3T[axis] for axis in (0, 1, 2, 0)], dim=1) * frequencies
    torch.testing.assert_close(cos, angles.cos().repeat(1, 2))
    torch.testing.assert_close(sin, angles.sin().repeat(1, 2))
    assert cos.dtype == torch.float32


def test_a_patch_grid_turns_half_by_row_and_half_by_column() -> None:
    cos, _ = GridRotary(PLACE, 8, 10000.0)(torch.tensor([[3], [4]]))
    angles = torch.tensor([3.0, 0.03, 4.0, 0.04])
    torch.testing.assert_close(cos[0], angles.cos().repeat(2))


def test_positions_far_beyond_any_table_are_exact() -> None:
    spec = RotarySpec(width=64, base=5e6, axes=plain_axes(64))
    far = torch.tensor([[1_000_003]])
    cos, _ = Rotary(PLACE, spec)(far)
    torch.testing.assert_close(cos[0, :32], (far.float() * inverse_frequencies(spec)).cos()[0])


@pytest.mark.parametrize("factor", [4.0, 32.0])
def test_scalings_match_transformers(factor: float) -> None:
    values = {"factor": factor, "rope_theta": 500000.0}
    llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, max_position_embeddings=131072)
    spec = RotarySpec(width=128, base=500000.0, axes=plain_axes(128))

    config.rope_parameters = {"rope_type": "llama3"} | values | llama3
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    scaling = Llama3Scaling(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
    ours = inverse_frequencies(RotarySpec(width=128, base=500000.0, axes=spec.axes, scaling=scaling))
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=0)

    config.rope_parameters = {"rope_type": "linear"} | values
    expected, _ = ROPE_INIT_FUNCTIONS["linear"](config)
    linear = LinearScaling(factor=factor)
    ours = inverse_frequencies(RotarySpec(width=128, base=500000.0, axes=spec.axes, scaling=linear))
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)

"""Patch geometry against transformers' own functions, on random grids."""

import numpy as np
import pytest
import torch
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from saccade.errors import ConfigError
from saccade.models.families.qwen2_5_vl import read_vision as read_qwen2_5
from saccade.models.families.qwen3_vl import read_vision as read_qwen3
from saccade.models.model_config import Config
from saccade.models.model_spec import VisionSpec
from saccade.scheduling.geometries import Grid, geometry
from tests.models.steps import vision_step

VISION = {
    "depth": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}
QWEN3 = read_qwen3(Config({"vision_config": VISION | {"num_position_embeddings": 2304}}))
QWEN2_5 = read_qwen2_5(Config({"vision_config": VISION | {"window_size": 112}}))


def random_grids(seed: int) -> list[Grid]:
    rng = np.random.default_rng(seed)
    return [
        (int(rng.integers(1, 4)), 2 * int(rng.integers(1, 40)), 2 * int(rng.integers(1, 40)))
        for _ in range(int(rng.integers(1, 6)))
    ]


@pytest.mark.parametrize("seed", range(12))
def test_positions_frames_and_taps_match_transformers(seed: int) -> None:
    grids = random_grids(seed)
    thw = torch.tensor(grids)
    where = geometry(QWEN3, grids)
    assert np.array_equal(where["positions"], get_vision_position_ids(thw, 2))
    assert np.array_equal(where["cu_seqlens"], get_vision_cu_seqlens(thw))
    indices, weights = get_vision_interpolation_indices_and_weights(
        thw, num_grid_per_side=48, align_corners=True, spatial_merge_size=2
    )
    np.testing.assert_allclose(where["grid_weights"], weights.T, atol=1e-6)
    matters = weights.T.numpy() > 1e-6
    assert np.array_equal(where["grid_indices"][matters], indices.T.numpy()[matters])


@pytest.mark.parametrize("seed", range(12))
def test_windows_match_transformers(seed: int) -> None:
    grids = random_grids(seed)
    order, boundaries = get_vision_window_index(
        torch.tensor(grids), spatial_merge_size=2, window_size=112, patch_size=14
    )
    where = geometry(QWEN2_5, grids)
    assert np.array_equal(where["window_order"], order)
    assert np.array_equal(where["window_cu_seqlens"], boundaries)
    assert np.array_equal(where["window_inverse"][order], np.arange(len(order)))


@pytest.mark.parametrize("spec", [QWEN3, QWEN2_5])
@pytest.mark.parametrize("padding", [0, 4, 64, 148])
def test_padded_rows_are_separate_segments(spec: VisionSpec, padding: int) -> None:
    """Checks the steps that the tests of towers use."""
    grids: list[Grid] = [(2, 4, 6), (1, 10, 18)]
    plain, padded = (vision_step(spec, grids, torch.zeros(228 + more, spec.patch_values)) for more in (0, padding))
    boundaries = padded.cu_seqlens_S1
    assert boundaries[-1] == 228 + padding and 228 in boundaries
    assert boundaries.diff().max() <= padded.max_segment
    assert torch.equal(padded.positions_P2[:228], plain.positions_P2)
    if spec.window:
        assert padded.window_order_U is not None and padded.window_cu_seqlens_W1 is not None
        assert padded.window_order_U[57:].tolist() == list(range(57, 57 + padding // 4))
        assert padded.window_cu_seqlens_W1[-1] == 228 + padding and 228 in padded.window_cu_seqlens_W1
        assert padded.window_cu_seqlens_W1.diff().max() <= padded.max_window == 64
    else:
        assert padded.grid_weights_4P is not None
        assert not padded.grid_weights_4P[:, 228:].any()


def test_grids_that_do_not_merge_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\(1, 3, 4\).*2x2"):
        geometry(QWEN3, [(1, 2, 2), (1, 3, 4)])

from typing import Any

import numpy as np
import pytest
import torch

from saccade.inputs.positions import FeatureRows, bidirectional_limits, mrope_positions, rope_delta, text_positions
from tests.inputs import oracles

IMAGE, VIDEO, MERGE = 7, 8, 2


def random_prompt(rng: np.random.Generator, *, has_timestamps: bool, seconds: list[float]) -> dict[str, Any]:
    """A random mix of text, images and videos, for transformers and as blocks."""
    types: list[int] = []
    blocks: list[FeatureRows] = []
    images, videos, steps = [], [], []

    def place(kind: int, grid: tuple[int, int, int], interval: float) -> None:
        merged = (grid[0], grid[1] // MERGE, grid[2] // MERGE)
        blocks.append(FeatureRows(len(types), merged, interval))
        types.extend([kind] * blocks[-1].length)
        types.extend([0] * int(rng.integers(1, 4)))

    types.extend([0] * int(rng.integers(0, 9)))
    for _ in range(int(rng.integers(0, 7))):
        height, width = (int(n) * MERGE for n in rng.integers(1, 9, 2))
        if rng.random() < 0.5:
            images.append((1, height, width))
            place(1, (1, height, width), 1.0)
        else:
            frames, second = int(rng.integers(1, 7)), float(rng.choice(seconds))
            videos.append((frames, height, width))
            steps.append(second)
            for grid in [(1, height, width)] * frames if has_timestamps else [(frames, height, width)]:
                place(2, grid, 1.0 if has_timestamps else 2 * second)
    types.extend([0] * int(rng.integers(1, 30)))
    return {"types": types, "blocks": blocks, "images": images, "videos": videos, "seconds": steps}


def reference(model_type: str, prompt: dict[str, Any]) -> tuple[np.ndarray[Any, Any], int]:
    types = torch.tensor([prompt["types"]])
    inputs = {
        "input_ids": torch.tensor([0, IMAGE, VIDEO])[types],
        "mm_token_type_ids": types,
        "image_grid_thw": torch.tensor(prompt["images"]) if prompt["images"] else None,
        "video_grid_thw": torch.tensor(prompt["videos"]) if prompt["videos"] else None,
    }
    if model_type == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = torch.tensor(prompt["seconds"]) if prompt["seconds"] else None
    config = {"spatial_merge_size": MERGE, "tokens_per_second": 2}
    positions, delta = oracles.rope_index(model_type, config, **inputs)
    return positions[:, 0].numpy(), int(delta[0, 0])


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_positions_equal_transformers(model_type: str) -> None:
    rng = np.random.default_rng(len(model_type))
    seconds = [0.5] if model_type == "qwen2_vl" else [1.0, 2.0, 3.0]  # Qwen2-VL's time steps are one position apart
    for _ in range(200):
        prompt = random_prompt(rng, has_timestamps=model_type == "qwen3_vl", seconds=seconds)
        expected, delta = reference(model_type, prompt)
        found = mrope_positions(len(prompt["types"]), prompt["blocks"])
        assert found.dtype == np.int32 and (found == expected).all()
        assert rope_delta(found) == delta


def test_fractional_time_steps_are_truncated_after_multiplying() -> None:
    """Unlike later versions, transformers 5.17 truncates seconds first: time stands still at 4 frames a second."""
    found = mrope_positions(8, [FeatureRows(2, (4, 1, 1), 2 * 0.5), FeatureRows(6, (2, 1, 1), 1.5)])
    assert found[0].tolist() == [0, 1, 2, 3, 4, 5, 3, 4]
    assert mrope_positions(5, [FeatureRows(0, (5, 1, 1), 1.5)])[0].tolist() == [0, 1, 3, 4, 6]


def test_time_steps_just_below_a_whole_number_are_not_truncated() -> None:
    """14 of 25 frames in 7 s are 2 a second, and 4 of 13 at 10 a second 0.65 s a step, but not in float64."""
    for interval, steps in [(2 * 2 / (14 / 25 * (25 / 7)), [0, 2, 4]), (2 * 2 / (4 / 13 * 10), [0, 1, 2])]:
        assert mrope_positions(3, [FeatureRows(0, (3, 1, 1), interval)])[0].tolist() == steps
    assert mrope_positions(11, [FeatureRows(0, (11, 1, 1), 2 * 2 / (4 / 13 * 10))])[0, 10] == 13


def test_text_counts_in_all_rows() -> None:
    assert (mrope_positions(9, []) == text_positions(9)).all()
    assert (text_positions(4) == np.arange(4)).all() and text_positions(4).shape == (3, 4)
    assert rope_delta(text_positions(9)) == 0 and rope_delta(text_positions(0)) == 0


def test_limits_are_the_end_of_the_image() -> None:
    limits = bidirectional_limits(12, [FeatureRows(2, (1, 1, 3)), FeatureRows(7, (1, 2, 2))])
    assert limits.tolist() == [0, 0, 5, 5, 5, 0, 0, 11, 11, 11, 11, 0]

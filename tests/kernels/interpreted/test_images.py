"""The Triton resize against the plain one, which is torch's own for bytes."""

from typing import Any

import pytest
import torch

from saccade.kernels import fused_images, images
from tests.kernels.cases import photo

SETTINGS: dict[str, Any] = {"mean": (0.48, 0.45, 0.4), "std": (0.27, 0.26, 0.28)}
ONE_LEVEL = 1.01 / 255 / 0.26


@pytest.mark.parametrize("resample", ["bicubic", "bilinear"])
@pytest.mark.parametrize(
    ("old", "new", "patch", "merge"),
    [
        ((41, 97), (28, 56), 14, 2),
        ((75, 20), (16, 16), 16, 1),
        ((9, 5), (42, 28), 14, 1),
        ((1, 1), (16, 32), 16, 1),
        ((32, 32), (32, 32), 16, 2),
    ],
)
def test_images(old: tuple[int, int], new: tuple[int, int], patch: int, merge: int, resample: str) -> None:
    pixels = photo(*old, seed=1)
    shape: dict[str, Any] = {"patch": patch, "merge": merge, "temporal_patch": 2}
    theirs = images.resize_patchify(pixels, new, **SETTINGS, **shape, resample=resample)
    ours = fused_images.resize_patchify(pixels, new, **SETTINGS, **shape, resample=resample)
    difference = (ours - theirs).abs()
    assert difference.max() <= ONE_LEVEL
    assert (difference > 1e-5).float().mean() < 1e-3


def test_video_into_a_buffer() -> None:
    video = torch.stack([photo(36, 30, seed=s) for s in range(3)])
    arena = torch.full((20, 3 * 2 * 256 + 8), float("nan"))
    shape: dict[str, Any] = {"patch": 16, "merge": 2, "temporal_patch": 2}
    rows = fused_images.resize_patchify(
        video,
        (32, 32),
        **SETTINGS,
        **shape,
        out=arena[2:10, :1536],
    )
    theirs = images.resize_patchify(video, (32, 32), **SETTINGS, **shape)
    assert (rows - theirs).abs().max() <= ONE_LEVEL
    assert torch.isnan(arena[:2]).all()
    assert torch.isnan(arena[10:]).all()
    assert torch.isnan(arena[:, 1536:]).all()

"""The Triton resize against the oracle, which is torch's own resize for bytes."""

from typing import Any

import numpy as np
import pytest
import torch

from saccade.errors import RequestError
from saccade.kernels import fused_images, reference_images
from saccade.kernels.image_jobs import (
    MAX_JOBS,
    Column,
    ImageJob,
    PatchSettings,
    Resample,
    banded_jobs,
    whole_job,
    write_table,
)
from tests.kernels.cases import photo

SETTINGS: dict[str, Any] = {"mean": (0.48, 0.45, 0.4), "std": (0.27, 0.26, 0.28)}
ONE_LEVEL = 1.01 / 255 / 0.26


SHAPES = {
    "qwen": PatchSettings(**SETTINGS, patch=4, temporal_patch=2, merge=2, resample="bicubic"),
    "gemma": PatchSettings(**SETTINGS, patch=7, temporal_patch=1, merge=1, resample="bilinear"),
}


def run_jobs(jobs: list[ImageJob], shape: PatchSettings, out: torch.Tensor) -> None:
    """Like the engine, puts the pixels of all jobs into one buffer, described by one table."""
    data = np.concatenate([np.ascontiguousarray(job.frames).ravel() for job in jobs])
    places = np.cumsum([0, *(job.frames.nbytes for job in jobs)])[:-1].tolist()
    table = np.full((len(Column), MAX_JOBS), -7, dtype=np.int32)
    counts = write_table(table, jobs, places, shape)
    scratch = torch.full((sum(job.scratch_bytes for job in jobs) + 3,), 255, dtype=torch.uint8)
    fused_images.JobKernels(torch.from_numpy(table), torch.from_numpy(data), scratch)(out, shape, counts)
    assert (scratch[-3:] == 255).all()


# Every source row is a program, which takes the interpreter tens of milliseconds, so images have few rows.
@pytest.mark.parametrize(
    ("old", "new", "patch", "merge", "resample"),
    [
        ((9, 42), (14, 14), 7, 2, "bilinear"),
        ((14, 5), (3, 3), 3, 1, "bicubic"),
        ((14, 5), (3, 3), 3, 1, "bilinear"),
        ((3, 97), (10, 20), 5, 2, "bicubic"),
        ((5, 3), (14, 28), 14, 1, "bicubic"),
        ((1, 1), (16, 32), 16, 1, "bicubic"),
        ((1, 1), (16, 32), 16, 1, "bilinear"),
        ((8, 8), (8, 8), 4, 2, "bicubic"),
    ],
)
def test_one_image(old: tuple[int, int], new: tuple[int, int], patch: int, merge: int, resample: Resample) -> None:
    pixels = photo(*old, seed=1)
    shape = PatchSettings(**SETTINGS, patch=patch, merge=merge, temporal_patch=2, resample=resample)
    expected = plain(pixels, new, shape)
    out = torch.full_like(expected, float("nan"))
    run_jobs([whole_job(pixels.numpy()[None], new, 0, shape)], shape, out)
    check(out, expected)


def test_a_video_into_rows_of_a_wider_buffer() -> None:
    video = torch.stack([photo(4, 15, seed=s) for s in range(3)])
    width = 3 * 2 * 64
    arena = torch.full((20, width + 8), float("nan"))
    shape = PatchSettings(**SETTINGS, patch=8, merge=2, temporal_patch=2, resample="bicubic")
    run_jobs([whole_job(video.numpy(), (16, 16), 2, shape)], shape, arena[:, :width])
    check(arena[2:10, :width], plain(video, (16, 16), shape))
    assert torch.isnan(arena[:2]).all()
    assert torch.isnan(arena[10:]).all()
    assert torch.isnan(arena[:, width:]).all()


def plain(pixels: torch.Tensor, size_hw: tuple[int, int], shape: PatchSettings) -> torch.Tensor:
    return reference_images.resize_patchify(pixels, size_hw, shape)


def check(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    difference = (ours - theirs).abs()
    assert difference.max() <= ONE_LEVEL
    assert (difference > 1e-5).float().mean() < 1e-3


@pytest.mark.parametrize("kind", SHAPES)
def test_many_images_and_videos_at_once(kind: str) -> None:
    shape = SHAPES[kind]
    side = shape.patch * shape.merge
    sources = [(1, 5, 10), (3, 2, 6), (2, 3, 4)]
    sizes = [(1, 2), (1, 1), (1, 1)]
    expected, jobs, row = [], [], 0
    for seed, ((frames, height, width), (down, across)) in enumerate(zip(sources, sizes, strict=True)):
        pixels = torch.stack([photo(height, width, seed=10 * seed + f) for f in range(frames)])
        size = (down * side, across * side)
        expected.append(plain(pixels, size, shape))
        jobs.append(whole_job(pixels.numpy(), size, row, shape))
        row += len(expected[-1])
    out = torch.full((row + 2, expected[0].shape[1]), float("nan"))
    run_jobs(jobs, shape, out)
    check(out[:row], torch.cat(expected))
    assert torch.isnan(out[row:]).all()


def test_bands_give_the_patches_of_the_whole_image() -> None:
    frames, old, new = 1, (24, 4), (16, 8)
    shape = SHAPES["qwen"]
    pixels = torch.stack([photo(*old, seed=f) for f in range(frames)]).numpy()
    whole = whole_job(pixels, new, 1, shape)
    num_rows = whole.num_patches(shape) + 2
    expected, out = (torch.full((num_rows, 3 * 2 * 16), float("nan")) for _ in range(2))
    run_jobs([whole], shape, expected)
    most = max(whole.frames.nbytes, whole.scratch_bytes) // frames * min(frames, 2)
    jobs = list(banded_jobs(pixels, new, 1, shape, most * 2 // 3))
    assert len(jobs) > -(-frames // 2)
    for job in jobs:
        assert max(job.frames.nbytes, job.scratch_bytes) <= most * 2 // 3
        run_jobs([job], shape, out)
    torch.testing.assert_close(out, expected, equal_nan=True, rtol=0, atol=0)


def test_an_image_too_large_for_any_band_is_refused() -> None:
    pixels = photo(64, 64, seed=1).numpy()[None]
    with pytest.raises(RequestError, match="64x64 pixels cannot be resized to 16x8 in pieces of 500 bytes"):
        list(banded_jobs(pixels, (8, 16), 0, SHAPES["qwen"], 500))

"""The CPU image path against Pillow and against the image processors of transformers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from saccade.errors import ConfigError
from saccade.kernels.image_jobs import PatchSettings, Resample
from saccade.kernels.reference_images import resize_patchify
from tests.kernels.cases import patches_to_frames, photo

PLAIN = PatchSettings(
    patch=14, temporal_patch=1, merge=1, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), resample="bicubic"
)


def levels(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a * 255).round().int().sub((b * 255).round().int()).abs()


@pytest.mark.parametrize(
    ("old", "new"), [((61, 97), (56, 84)), ((300, 211), (56, 28)), ((9, 5), (84, 56)), ((1, 1), (28, 28))]
)
@pytest.mark.parametrize("resample", ["bicubic", "bilinear"])
def test_resize_matches_pillow_within_one_level(old: tuple[int, int], new: tuple[int, int], resample: Resample) -> None:
    pixels = photo(*old, seed=1)
    rows = resize_patchify(pixels, new, replace(PLAIN, merge=2, resample=resample))
    ours = patches_to_frames(rows, new, 14, 1, 2)[0]
    filters = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
    rows_first = Image.fromarray(pixels.numpy()).resize((new[1], old[0]), filters[resample])
    theirs = np.asarray(rows_first.resize((new[1], new[0]), filters[resample]))
    assert levels(ours, torch.from_numpy(theirs.copy()) / 255).max() <= 1


@pytest.mark.parametrize(("height", "width"), [(56, 84), (196, 28), (28, 252)])
def test_image_rows_match_the_qwen_processor(height: int, width: int) -> None:
    """The image needs no resize, because this processor uses Pillow, which filters in another order."""
    processor = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * 30)
    pixels = photo(height, width, seed=2)
    theirs = processor(Image.fromarray(pixels.numpy()), return_tensors="pt")
    assert theirs["image_grid_thw"].tolist() == [[1, height // 14, width // 14]]
    mean, std = tuple(processor.image_mean), tuple(processor.image_std)
    settings = replace(PLAIN, temporal_patch=2, merge=2, mean=mean, std=std)
    ours = resize_patchify(pixels, (height, width), settings)
    torch.testing.assert_close(ours, theirs["pixel_values"], rtol=1e-5, atol=1e-5)


def test_video_rows_keep_their_frames_and_repeat_the_last() -> None:
    video = torch.stack([photo(40, 60, seed=s) for s in range(5)])
    ours = resize_patchify(video, (32, 64), replace(PLAIN, patch=16, temporal_patch=2, merge=2))
    frames = patches_to_frames(ours, (32, 64), 16, 2, 2)
    assert ours.shape == (3 * 8, 3 * 2 * 256)
    for i in range(6):
        alone = resize_patchify(video[min(i, 4)], (32, 64), replace(PLAIN, patch=16))
        assert torch.equal(frames[i], patches_to_frames(alone, (32, 64), 16, 1, 1)[0])


def test_rows_without_merging_are_in_convolution_order() -> None:
    pixels = photo(50, 40, seed=3)
    ours = resize_patchify(pixels, (42, 28), replace(PLAIN, mean=(0.5,) * 3, std=(0.5,) * 3, resample="bilinear"))
    image = patches_to_frames(ours, (42, 28), 14, 1, 1)[0].permute(2, 0, 1)
    weight = torch.randn(7, 3, 14, 14, generator=torch.Generator().manual_seed(4))
    convolved = torch.nn.functional.conv2d(image[None], weight, stride=14)[0].flatten(1).T
    torch.testing.assert_close(ours @ weight.flatten(1).T, convolved, rtol=1e-4, atol=1e-4)


def test_rows_land_in_the_given_buffer() -> None:
    pixels = photo(20, 20, seed=5)
    arena = torch.full((10, 588), float("nan"), dtype=torch.bfloat16)
    rows = resize_patchify(pixels, (28, 28), replace(PLAIN, merge=2), arena[3:7])
    assert rows.data_ptr() == arena[3].data_ptr()
    assert torch.isfinite(arena[3:7]).all()
    assert torch.isnan(arena[:3]).all()
    assert torch.isnan(arena[7:]).all()


def test_bad_inputs_are_refused_with_what_is_expected() -> None:
    pixels = photo(20, 20, seed=6)
    with pytest.raises(ConfigError, match="allowed: bilinear, bicubic"):
        resize_patchify(pixels, (28, 28), replace(PLAIN, resample="nearest"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="multiples of 28"):
        resize_patchify(pixels, (28, 42), replace(PLAIN, merge=2))
    with pytest.raises(ConfigError, match="RGB bytes"):
        resize_patchify(pixels.float(), (28, 28), PLAIN)

"""Resize, normalise and cut into patches on the GPU, in two launches, straight into a buffer of the caller's."""

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
import triton
from torch import Tensor

from saccade.kernels.images import RESAMPLING, check_request
from saccade.kernels.triton_images import patchify_columns_kernel, resize_rows_kernel

_STRETCH = 512  # elements of one program of the first pass


def resize_patchify(  # noqa: PLR0913
    pixels_FHWC: Tensor,
    size_hw: tuple[int, int],
    *,
    mean: Sequence[float],
    std: Sequence[float],
    patch: int,
    temporal_patch: int = 1,
    merge: int = 1,
    resample: str = "bicubic",
    out: Tensor | None = None,
) -> Tensor:
    """See `images.resize_patchify`."""
    frames = (pixels_FHWC.unsqueeze(0) if pixels_FHWC.dim() == 3 else pixels_FHWC).contiguous()
    check_request(frames, size_hw, patch * merge, resample)
    num_frames, old_height, old_width, _ = frames.shape
    height, width = size_hw
    num_patches = -(-num_frames // temporal_patch) * (height // patch) * (width // patch)
    if out is None:
        num_columns = 3 * temporal_patch * patch * patch
        out = torch.empty((num_patches, num_columns), dtype=torch.float32, device=frames.device)
    assert out.shape[0] == num_patches and out.stride(1) == 1, (out.shape, out.stride(), num_patches)

    is_cubic = resample == "bicubic"
    rows = torch.empty((num_frames, old_height, width, 3), dtype=torch.uint8, device=frames.device)
    grid = (num_frames * old_height, triton.cdiv(width * 3, _STRETCH))
    resize_rows_kernel[grid](
        frames,
        rows,
        old_width * 3,
        old_width,
        width,
        *_filter(old_width, width, resample),
        CUBIC=is_cubic,
        BLOCK=_STRETCH,
    )
    repeats = temporal_patch if num_frames == 1 else 1
    patchify_columns_kernel[(num_patches, temporal_patch // repeats)](
        rows,
        out,
        out.stride(0),
        num_frames,
        old_height,
        height,
        width,
        *_filter(old_height, height, resample),
        *(float(x) for x in mean),
        *(float(x) for x in std),
        CUBIC=is_cubic,
        PATCH=patch,
        TEMPORAL=temporal_patch,
        REPEATS=repeats,
        MERGE=merge,
        BLOCK=triton.next_power_of_2(3 * patch * patch),
    )
    return out


@functools.lru_cache(maxsize=4096)
def _filter(old: int, new: int, resample: str) -> tuple[float, float, int, int]:
    """How far the filter is stretched, its reach and the most pixels it touches, and the binary places of its weights.

    torch keeps weights in 16 bits, with as many places as the largest weight of any pixel leaves.
    """
    stretch = max(old / new, 1.0)
    reach = RESAMPLING[resample] * stretch
    num_taps = math.ceil(2 * reach) + 2
    centres = (np.arange(new)[:, None] + 0.5) * (old / new)
    sources = np.floor(centres - reach - 0.5) + np.arange(num_taps)
    x = np.abs(sources + 0.5 - centres) / stretch
    if resample == "bicubic":
        far = np.where(x < 2, ((-0.5 * x + 2.5) * x - 4) * x + 2, 0.0)
        weights = np.where(x < 1, (1.5 * x - 2.5) * x * x + 1, far)
    else:
        weights = np.maximum(1 - x, 0.0)
    weights *= (sources >= 0) & (sources < old)
    largest = float((weights / weights.sum(1, keepdims=True)).max())
    precision = max(p for p in range(23) if p == 0 or int(0.5 + largest * 2**p) < 2**15)
    return stretch, reach, num_taps, precision

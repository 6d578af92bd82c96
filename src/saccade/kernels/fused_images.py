"""Resize, normalise and cut into patches on the GPU, in two launches, straight into a buffer of the caller's."""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from saccade.kernels.image_jobs import MAX_JOBS, Shape, filter_numbers
from saccade.kernels.images import check_request
from saccade.kernels.launch import KeptLaunch
from saccade.kernels.triton_images import (
    job_patches_kernel,
    job_rows_kernel,
    patchify_columns_kernel,
    resize_rows_kernel,
)

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
        *filter_numbers(old_width, width, resample),
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
        *filter_numbers(old_height, height, resample),
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


class JobKernels:
    """All jobs of a table in two launches, for a table, pixels and scratch that stay where they are: then only the
    first launch of a shape into a buffer costs what a launch by Triton does. Allocates nothing."""

    def __init__(self, table_XJ: Tensor, pixels: Tensor, scratch: Tensor) -> None:
        self._tables = table_XJ, table_XJ.view(torch.float32)
        self._pixels, self._scratch = pixels, scratch
        self._rows, self._patches = KeptLaunch(job_rows_kernel), KeptLaunch(job_patches_kernel)

    def __call__(self, out_PC: Tensor, shape: Shape, counts: tuple[int, int, int]) -> None:
        """`counts` is what `image_jobs.write_table` returned."""
        num_lines, num_patches, widest = counts
        num_columns = 3 * shape.temporal_patch * shape.patch * shape.patch
        assert out_PC.shape[1] == num_columns, f"patches have {num_columns} values, rows {out_PC.shape[1]}"
        is_cubic = shape.resample == "bicubic"
        self._rows(
            is_cubic,
            (num_lines, -(-widest * 3 // _STRETCH)),
            *self._tables,
            self._pixels,
            self._scratch,
            JOBS=MAX_JOBS,
            CUBIC=is_cubic,
            BLOCK=_STRETCH,
        )
        stride = out_PC.stride(0)
        self._patches(
            (shape, out_PC.data_ptr(), stride, out_PC.dtype),
            (num_patches, shape.temporal_patch),
            *self._tables,
            self._scratch,
            out_PC,
            stride,
            *shape.mean,
            *shape.std,
            JOBS=MAX_JOBS,
            CUBIC=is_cubic,
            PATCH=shape.patch,
            TEMPORAL=shape.temporal_patch,
            MERGE=shape.merge,
            BLOCK=1 << (3 * shape.patch * shape.patch - 1).bit_length(),
        )

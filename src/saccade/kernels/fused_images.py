"""Resize, normalise and cut into patches on the GPU, in two launches, straight into a buffer of the caller's."""

import torch
from torch import Tensor

from saccade.kernels.image_jobs import MAX_JOBS, PatchSettings
from saccade.kernels.launch import KeptLaunch
from saccade.kernels.triton_images import job_patches_kernel, job_rows_kernel

_STRETCH = 512  # elements of one program of the first pass


class JobKernels:
    """All jobs of a table in two launches, for a table, pixels and scratch that stay where they are: then only the
    first launch of a shape into a buffer costs what a launch by Triton does. Allocates nothing."""

    def __init__(self, table_XJ: Tensor, pixels: Tensor, scratch: Tensor) -> None:
        self._tables = table_XJ, table_XJ.view(torch.float32)
        self._pixels, self._scratch = pixels, scratch
        self._rows, self._patches = KeptLaunch(job_rows_kernel), KeptLaunch(job_patches_kernel)

    def __call__(self, out_PC: Tensor, shape: PatchSettings, counts: tuple[int, int, int]) -> None:
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

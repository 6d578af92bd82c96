# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: PLR0913
"""Resizes and normalises images and cuts them into patches on the GPU: two launches, straight into the caller's buffer.

The resize is separable and antialiased, in two passes. The kernels compute filter weights from the exact integer
distance between pixel centres, so no table per image size is uploaded. As in torch, weights are rounded to `precision`
binary places and summed as integers: otherwise a difference in the first pass could grow to two levels in the second.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.grids import cdiv, next_power_of_2
from saccade.kernels.image_jobs import MAX_JOBS, Column, PatchSettings
from saccade.kernels.launch import Launcher

_BLOCK = 512  # elements of one program of the first pass
# Triton kernels cannot read an enum. Constexpr globals are part of a compiled kernel's cache key.
(
    ROWS_START, PATCHES_START, PIXELS_AT, NUM_FRAMES, BAND_ROWS, BAND_START, OLD_WIDTH, OLD_HEIGHT, WIDTH, SCRATCH_AT,
    OUT_ROW, PATCHES_PER_STEP, ROW_TAPS, ROW_PRECISION, COLUMN_TAPS, COLUMN_PRECISION, ROW_STRETCH, ROW_REACH, HEIGHT,
    COLUMN_STRETCH, COLUMN_REACH, FIRST_PATCH,
) = (tl.constexpr(int(column)) for column in Column)  # fmt: skip


class JobKernels:
    """Runs all jobs of a table in two launches and allocates nothing."""

    def __init__(self, table_XJ: Tensor, pixels: Tensor, scratch: Tensor) -> None:
        self._tables = table_XJ, table_XJ.view(torch.float32)
        self._pixels, self._scratch = pixels, scratch

    def __call__(self, out_PC: Tensor, shape: PatchSettings, counts: tuple[int, int, int]) -> None:
        """`counts` is what `image_jobs.write_table` returned."""
        num_lines, num_patches, widest = counts
        num_columns = 3 * shape.temporal_patch * shape.patch * shape.patch
        assert out_PC.shape[1] == num_columns, f"patches have {num_columns} values, rows {out_PC.shape[1]}"
        is_cubic = shape.resample == "bicubic"
        job_rows_kernel[(num_lines, cdiv(widest * 3, _BLOCK))](
            *self._tables,
            self._pixels,
            self._scratch,
            JOBS=MAX_JOBS,
            CUBIC=is_cubic,
            BLOCK=_BLOCK,
        )
        job_patches_kernel[(num_patches, shape.temporal_patch)](
            *self._tables,
            self._scratch,
            out_PC,
            out_PC.stride(0),
            *shape.mean,
            *shape.std,
            JOBS=MAX_JOBS,
            CUBIC=is_cubic,
            PATCH=shape.patch,
            TEMPORAL=shape.temporal_patch,
            MERGE=shape.merge,
            BLOCK=next_power_of_2(3 * shape.patch * shape.patch),
        )


@triton.jit
def _weight(target, source, num_targets, num_sources, stretch, CUBIC: tl.constexpr):
    """The filter weight of a source pixel for a target pixel: the Keys cubic with a = -1/2, or the triangle."""
    ahead = (2 * source + 1).to(tl.int64) * num_targets - (2 * target + 1).to(tl.int64) * num_sources
    x = tl.abs(ahead.to(tl.float32) / (2.0 * num_targets * stretch))
    if CUBIC:
        near = (1.5 * x - 2.5) * x * x + 1.0
        far = ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
        weight = tl.where(x < 1.0, near, tl.where(x < 2.0, far, 0.0))
    else:
        weight = tl.where(x < 1.0, 1.0 - x, 0.0)
    return tl.where((source >= 0) & (source < num_sources), weight, 0.0)


@triton.jit
def _first_source(target, num_targets, num_sources, reach):
    """A pixel at or just before the first source pixel with a weight; pixels outside the image get weight 0."""
    centre = (target.to(tl.float32) + 0.5) * (num_sources / num_targets)
    return tl.floor(centre - reach - 0.5).to(tl.int32)


@triton.jit
def _filtered(
    source_ptr,
    source_stride,
    target,
    inside,
    num_targets,
    num_sources,
    low,
    high,
    stretch,
    reach,
    num_taps,
    precision,
    CUBIC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The filtered byte of each target pixel. The line of source pixels starts at source_ptr; only its pixels [low,
    high) are in memory, and the others have no weight."""
    first = _first_source(target, num_targets, num_sources, reach)
    mass = tl.zeros([BLOCK], dtype=tl.float32)
    for tap in range(num_taps):
        mass += _weight(target, first + tap, num_targets, num_sources, stretch, CUBIC)
    unit = (1 << precision).to(tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.int32)
    for tap in range(num_taps):
        source = first + tap
        weight = _weight(target, source, num_targets, num_sources, stretch, CUBIC) / mass * unit
        rounded = tl.where(weight < 0.0, -tl.floor(0.5 - weight), tl.floor(weight + 0.5)).to(tl.int32)
        valid = inside & (source >= low) & (source < high)
        total += rounded * tl.load(source_ptr + source * source_stride, mask=valid, other=0).to(tl.int32)
    return tl.minimum(tl.maximum((total + (1 << (precision - 1))) >> precision, 0), 255)


@triton.jit
def _job_of(starts_ptr, place, JOBS: tl.constexpr):
    """The last job that starts at or before `place`. Starts ascend, and unused ones lie beyond every place."""
    starts = tl.load(starts_ptr + tl.arange(0, JOBS))
    return tl.sum((starts <= place).to(tl.int32), axis=0) - 1


@Launcher
@triton.jit
def job_rows_kernel(
    table_ptr,
    floats_ptr,
    pixels_ptr,
    scratch_ptr,
    JOBS: tl.constexpr,
    CUBIC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row of any frame of any job, block of its new pixels)."""
    line = tl.program_id(0)
    job = _job_of(table_ptr + ROWS_START * JOBS, line, JOBS)
    row = (line - tl.load(table_ptr + ROWS_START * JOBS + job)).to(tl.int64)
    old_width = tl.load(table_ptr + OLD_WIDTH * JOBS + job)
    width = tl.load(table_ptr + WIDTH * JOBS + job)
    num_taps = tl.load(table_ptr + ROW_TAPS * JOBS + job)
    precision = tl.load(table_ptr + ROW_PRECISION * JOBS + job)
    stretch = tl.load(floats_ptr + ROW_STRETCH * JOBS + job)
    reach = tl.load(floats_ptr + ROW_REACH * JOBS + job)
    elements = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = elements < width * 3
    if tl.program_id(1) * BLOCK < width * 3:
        x, channel = elements // 3, elements % 3
        source = pixels_ptr + tl.load(table_ptr + PIXELS_AT * JOBS + job).to(tl.int64) + row * old_width * 3 + channel
        value = _filtered(
            source, 3, x, inside, width, old_width, 0, old_width, stretch, reach, num_taps, precision, CUBIC, BLOCK
        )  # fmt: skip
        target = scratch_ptr + tl.load(table_ptr + SCRATCH_AT * JOBS + job).to(tl.int64) + row * width * 3
        tl.store(target + elements, value.to(tl.uint8), mask=inside)


@Launcher
@triton.jit(do_not_specialize=("out_stride",))
def job_patches_kernel(
    table_ptr,
    floats_ptr,
    scratch_ptr,
    out_ptr,
    out_stride,
    mean_r,
    mean_g,
    mean_b,
    std_r,
    std_g,
    std_b,
    JOBS: tl.constexpr,
    CUBIC: tl.constexpr,
    PATCH: tl.constexpr,
    TEMPORAL: tl.constexpr,
    MERGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (patch of any job, frame within it): resizes along the columns, normalises, and writes the frame's part
    of the patch's row. An image has one frame, which its first program writes TEMPORAL times."""
    place = tl.program_id(0)
    within = tl.program_id(1)
    job = _job_of(table_ptr + PATCHES_START * JOBS, place, JOBS)
    local = place - tl.load(table_ptr + PATCHES_START * JOBS + job)
    num_frames = tl.load(table_ptr + NUM_FRAMES * JOBS + job)
    band_rows = tl.load(table_ptr + BAND_ROWS * JOBS + job)
    band_start = tl.load(table_ptr + BAND_START * JOBS + job)
    old_height = tl.load(table_ptr + OLD_HEIGHT * JOBS + job)
    width = tl.load(table_ptr + WIDTH * JOBS + job)
    height = tl.load(table_ptr + HEIGHT * JOBS + job)
    num_taps = tl.load(table_ptr + COLUMN_TAPS * JOBS + job)
    precision = tl.load(table_ptr + COLUMN_PRECISION * JOBS + job)
    stretch = tl.load(floats_ptr + COLUMN_STRETCH * JOBS + job)
    reach = tl.load(floats_ptr + COLUMN_REACH * JOBS + job)
    per_step = tl.load(table_ptr + PATCHES_PER_STEP * JOBS + job)
    first_patch = tl.load(table_ptr + FIRST_PATCH * JOBS + job)
    if (num_frames > 1) | (within == 0):
        step, spot = local // per_step, local % per_step + first_patch
        inner, group = spot % (MERGE * MERGE), spot // (MERGE * MERGE)
        groups_across = width // PATCH // MERGE
        patch_y = group // groups_across * MERGE + inner // MERGE
        patch_x = group % groups_across * MERGE + inner % MERGE
        frame = tl.minimum(step * TEMPORAL + within, num_frames - 1).to(tl.int64)
        elements = tl.arange(0, BLOCK)
        inside = elements < 3 * PATCH * PATCH
        channel, cell = elements // (PATCH * PATCH), elements % (PATCH * PATCH)
        y, x = patch_y * PATCH + cell // PATCH, patch_x * PATCH + cell % PATCH
        line = scratch_ptr + tl.load(table_ptr + SCRATCH_AT * JOBS + job).to(tl.int64)
        line += (frame * band_rows - band_start) * width * 3 + x * 3 + channel
        byte = _filtered(
            line, width * 3, y, inside, height, old_height, band_start, band_start + band_rows, stretch, reach,
            num_taps, precision, CUBIC, BLOCK,
        )  # fmt: skip
        mean = tl.where(channel == 0, mean_r, tl.where(channel == 1, mean_g, mean_b))
        std = tl.where(channel == 0, std_r, tl.where(channel == 1, std_g, std_b))
        value = ((byte.to(tl.float32) / 255.0 - mean) / std).to(out_ptr.dtype.element_ty)
        row = (tl.load(table_ptr + OUT_ROW * JOBS + job) + local).to(tl.int64)
        target = out_ptr + row * out_stride + channel * TEMPORAL * PATCH * PATCH + cell
        for copy in tl.static_range(TEMPORAL):
            if (num_frames == 1) | (within == copy):
                tl.store(target + copy * PATCH * PATCH, value, mask=inside)

"""The jobs of one resize-and-patchify launch, as a table of numbers. Needs only numpy.

A job is one image or video. If that does not fit into a pixel buffer, it is split into bands: some rows of merged units
of one time step, with the source rows they need. So memory is bounded for any input.
"""

import functools
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from saccade.errors import RequestError

Resample = Literal["bilinear", "bicubic"]
Triple = tuple[float, float, float]

RESAMPLING: dict[str, float] = {"bilinear": 1.0, "bicubic": 2.0}  # the filter's radius, in pixels of the coarser image
MAX_JOBS = 64  # per launch: every program compares all starts to find its job
BEYOND = 2**31 - 1
MARGIN_ROWS = 1  # the device computes the first source row in float32


class Column(IntEnum):
    """Columns of the (columns, jobs) int32 table. Floats are stored as their bits."""

    ROWS_START = 0  # lines (frames times source rows) of all earlier jobs
    PATCHES_START = 1
    PIXELS_AT = 2  # bytes
    NUM_FRAMES = 3
    BAND_ROWS = 4
    BAND_START = 5  # the first source row in memory
    OLD_WIDTH = 6
    OLD_HEIGHT = 7
    WIDTH = 8
    SCRATCH_AT = 9  # bytes
    OUT_ROW = 10
    PATCHES_PER_STEP = 11
    ROW_TAPS = 12
    ROW_PRECISION = 13
    COLUMN_TAPS = 14
    COLUMN_PRECISION = 15
    ROW_STRETCH = 16  # float
    ROW_REACH = 17  # float
    HEIGHT = 18
    COLUMN_STRETCH = 19  # float
    COLUMN_REACH = 20  # float
    FIRST_PATCH = 21


TABLE_BYTES = 4 * len(Column) * MAX_JOBS
_COLUMNS = struct.Struct("=16i2fi2fi")  # of one job, in order
assert _COLUMNS.size == 4 * len(Column)


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchSettings:
    """How pixels are cut into patches; the same for all jobs of a launch. `merge` x `merge` patches become one token
    and are neighbours in patch order."""

    patch: int
    temporal_patch: int
    merge: int
    mean: Triple
    std: Triple
    resample: Resample

    def alone(self) -> "PatchSettings":
        """A copy without the fields of a subclass."""
        return PatchSettings(**{field.name: getattr(self, field.name) for field in fields(PatchSettings)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageJob:
    """`frames` (F, rows, old width, 3) hold the source rows from `band_start` on. The job makes `patches_per_step`
    patches of each time step, from its patch `first_patch` on, and writes them to rows from `out_row` on."""

    frames: NDArray[np.uint8]
    old_height: int
    size_hw: tuple[int, int]
    out_row: int
    band_start: int = 0
    first_patch: int = 0
    patches_per_step: int

    @property
    def num_lines(self) -> int:
        num_frames, band_rows = self.frames.shape[:2]
        return int(num_frames * band_rows)

    @property
    def scratch_bytes(self) -> int:
        return self.num_lines * self.size_hw[1] * 3

    def num_patches(self, shape: PatchSettings) -> int:
        return -(-int(self.frames.shape[0]) // shape.temporal_patch) * self.patches_per_step


def whole_job(frames: NDArray[np.uint8], size_hw: tuple[int, int], out_row: int, shape: PatchSettings) -> ImageJob:
    per_step = (size_hw[0] // shape.patch) * (size_hw[1] // shape.patch)
    return ImageJob(
        frames=frames, old_height=frames.shape[1], size_hw=size_hw, out_row=out_row, patches_per_step=per_step
    )


def banded_jobs(
    frames: NDArray[np.uint8], size_hw: tuple[int, int], out_row: int, shape: PatchSettings, max_bytes: int
) -> Iterator[ImageJob]:
    """Splits one job into jobs with at most `max_bytes` of pixels and of scratch each."""
    num_frames, old_height, old_width, _ = frames.shape
    side = shape.patch * shape.merge
    per_unit_row = size_hw[1] // shape.patch * shape.merge
    steps = range(0, num_frames, shape.temporal_patch)
    num_unit_rows = size_hw[0] // side
    row_bytes = min(shape.temporal_patch, num_frames) * 3 * max(old_width, size_hw[1])
    for step_idx, first_frame in enumerate(steps):
        chosen = frames[first_frame : first_frame + shape.temporal_patch]
        start = 0
        while start < num_unit_rows:
            stop = _last_fit(start, num_unit_rows, old_height, size_hw[0], side, shape.resample, max_bytes // row_bytes)
            if stop == start:
                raise RequestError(
                    f"an image or video of {old_width}x{old_height} pixels cannot be resized to "
                    f"{size_hw[1]}x{size_hw[0]} in pieces of {max_bytes} bytes",
                    code="image_too_large",
                )
            low, high = source_rows(start * side, stop * side, old_height, size_hw[0], shape.resample)
            first_patch = start * per_unit_row
            yield ImageJob(
                frames=chosen[:, low:high],
                old_height=old_height,
                size_hw=size_hw,
                out_row=out_row + step_idx * num_unit_rows * per_unit_row + first_patch,
                band_start=low,
                first_patch=first_patch,
                patches_per_step=(stop - start) * per_unit_row,
            )
            start = stop


def source_rows(start: int, stop: int, old: int, new: int, resample: str) -> tuple[int, int]:
    """The range of source rows that target rows [start, stop) depend on."""
    _, reach, num_taps, _ = filter_numbers(old, new, resample)
    low = math.floor((start + 0.5) * old / new - reach - 0.5) - MARGIN_ROWS
    high = math.floor((stop - 0.5) * old / new - reach - 0.5) + num_taps + MARGIN_ROWS
    return max(low, 0), min(high, old)


def write_table(
    table: NDArray[np.int32], jobs: list[ImageJob], places: list[int], shape: PatchSettings
) -> tuple[int, int, int]:
    """Fills a (columns, MAX_JOBS) table for jobs whose pixels are at byte offsets `places`. Returns the number of
    lines, the number of patches, and the width of the widest target."""
    assert 0 < len(jobs) <= MAX_JOBS, len(jobs)
    table[Column.ROWS_START : Column.PATCHES_START + 1, len(jobs) :] = BEYOND
    line = patch = scratch = 0
    for i, (job, place) in enumerate(zip(jobs, places, strict=True)):
        table[:, i] = np.frombuffer(_columns(job, (line, patch, place, scratch), shape.resample), np.int32)
        line += job.num_lines
        patch += job.num_patches(shape)
        scratch += job.scratch_bytes
    return line, patch, max(job.size_hw[1] for job in jobs)


@functools.lru_cache(maxsize=4096)
def filter_numbers(old: int, new: int, resample: str) -> tuple[float, float, int, int]:
    """The filter's stretch, reach and maximum number of taps, and the number of binary places of its weights. torch
    keeps weights in 16 bits, with as many places as the largest weight allows."""
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


def _last_fit(start: int, count: int, old: int, new: int, side: int, resample: str, max_rows: int) -> int:
    """The largest stop, in rows of units, such that a band from `start` needs at most `max_rows` source rows."""
    low, high = start, count
    while low < high:
        middle = (low + high + 1) // 2
        first, last = source_rows(start * side, middle * side, old, new, resample)
        low, high = (middle, high) if last - first <= max_rows else (low, middle - 1)
    return low


def _columns(job: ImageJob, starts: tuple[int, int, int, int], resample: str) -> bytes:
    line, patch, place, scratch = starts
    num_frames, band_rows, old_width, _ = job.frames.shape
    height, width = job.size_hw
    row_filter = filter_numbers(old_width, width, resample)
    column_filter = filter_numbers(job.old_height, height, resample)
    return _COLUMNS.pack(
        line,
        patch,
        place,
        num_frames,
        band_rows,
        job.band_start,
        old_width,
        job.old_height,
        width,
        scratch,
        job.out_row,
        job.patches_per_step,
        *row_filter[2:],
        *column_filter[2:],
        *row_filter[:2],
        height,
        *column_filter[:2],
        job.first_patch,
    )

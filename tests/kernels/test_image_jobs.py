"""The table of jobs that the image kernels read, column by column."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from saccade.kernels.image_jobs import (
    BEYOND,
    MARGIN_ROWS,
    MAX_JOBS,
    RESAMPLING,
    Column,
    ImageJob,
    PatchSettings,
    banded_jobs,
    filter_numbers,
    source_rows,
    write_table,
)
from tests.kernels.test_launch import Kernel

SHAPE = PatchSettings(mean=(0.5,) * 3, std=(0.5,) * 3, patch=4, temporal_patch=2, merge=2, resample="bicubic")


def random_jobs(rng: np.random.Generator, count: int) -> list[ImageJob]:
    jobs = []
    for _ in range(count):
        frames, rows, width = (int(n) for n in rng.integers(1, 9, 3))
        start, first, out_row, per_step = (int(n) for n in rng.integers(0, 90, 4))
        down, across = (int(n) * 8 for n in rng.integers(1, 5, 2))
        jobs.append(
            ImageJob(
                frames=np.zeros((frames, rows, width, 3), np.uint8),
                old_height=start + rows + int(rng.integers(0, 9)),
                size_hw=(down, across),
                out_row=out_row,
                band_start=start,
                first_patch=first,
                patches_per_step=per_step + 1,
            )
        )
    return jobs


@pytest.mark.parametrize("seed", range(5))
def test_every_column_holds_what_its_name_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    jobs = random_jobs(rng, int(rng.integers(1, MAX_JOBS + 1)))
    places = rng.integers(0, 2**30, len(jobs)).tolist()
    table = rng.integers(-(2**31), 2**31, (len(Column), MAX_JOBS)).astype(np.int32)
    counts = write_table(table, jobs, places, SHAPE)
    floats = table.view(np.float32)
    line = patch = scratch = 0
    for i, job in enumerate(jobs):
        frames, rows, width, _ = job.frames.shape
        across = filter_numbers(width, job.size_hw[1], "bicubic")
        down = filter_numbers(job.old_height, job.size_hw[0], "bicubic")
        expected = {
            Column.ROWS_START: line,
            Column.PATCHES_START: patch,
            Column.PIXELS_AT: places[i],
            Column.NUM_FRAMES: frames,
            Column.BAND_ROWS: rows,
            Column.BAND_START: job.band_start,
            Column.OLD_WIDTH: width,
            Column.OLD_HEIGHT: job.old_height,
            Column.WIDTH: job.size_hw[1],
            Column.SCRATCH_AT: scratch,
            Column.OUT_ROW: job.out_row,
            Column.PATCHES_PER_STEP: job.patches_per_step,
            Column.ROW_TAPS: across[2],
            Column.ROW_PRECISION: across[3],
            Column.COLUMN_TAPS: down[2],
            Column.COLUMN_PRECISION: down[3],
            Column.HEIGHT: job.size_hw[0],
            Column.FIRST_PATCH: job.first_patch,
        }
        assert {column: int(table[column, i]) for column in expected} == expected
        fractions = {
            Column.ROW_STRETCH: across[0],
            Column.ROW_REACH: across[1],
            Column.COLUMN_STRETCH: down[0],
            Column.COLUMN_REACH: down[1],
        }
        assert {column: float(floats[column, i]) for column in fractions} == {
            column: float(np.float32(value)) for column, value in fractions.items()
        }
        assert expected.keys() | fractions.keys() == set(Column)
        line += frames * rows
        patch += -(-frames // 2) * job.patches_per_step
        scratch += frames * rows * job.size_hw[1] * 3
    assert counts == (line, patch, max(job.size_hw[1] for job in jobs))
    assert (table[:2, len(jobs) :] == BEYOND).all()


def test_bands_cover_all_patches_once_within_their_bytes() -> None:
    frames = np.zeros((3, 90, 40, 3), np.uint8)
    jobs = list(banded_jobs(frames, (64, 32), 5, SHAPE, 12_000))
    assert len(jobs) > 2
    rows = [row for job in jobs for row in range(job.out_row, job.out_row + job.num_patches(SHAPE))]
    assert sorted(rows) == list(range(5, 5 + 2 * 16 * 8))
    assert all(max(job.frames.nbytes, job.scratch_bytes) <= 12_000 for job in jobs)


@pytest.mark.parametrize("resample", RESAMPLING)
def test_a_band_has_the_source_rows_that_its_target_rows_weigh_and_few_more(resample: str) -> None:
    rng = np.random.default_rng(6)
    for _ in range(300):
        old, new = (int(side) for side in rng.integers(1, 90, 2))
        start, stop = sorted(int(row) for row in rng.choice(new + 1, 2, replace=False))
        centres = (np.arange(start, stop) + 0.5) * old / new
        reach = RESAMPLING[resample] * max(old / new, 1)
        distances = np.abs(np.arange(old)[:, None] + 0.5 - centres)
        weighed = np.flatnonzero((distances < reach - 1e-9).any(axis=1))
        low, high = source_rows(start, stop, old, new, resample)
        first, last = int(weighed[0]), int(weighed[-1])
        assert 0 <= low <= max(first - MARGIN_ROWS, 0) and min(last + MARGIN_ROWS, old - 1) < high <= old
        assert first - low <= MARGIN_ROWS + 2 and high - last <= MARGIN_ROWS + 4


def test_host_and_device_agree_on_the_columns() -> None:
    device_code: Any = pytest.importorskip("saccade.kernels.fused_images")
    assert {column.name: getattr(device_code, column.name).value for column in Column} == Column.__members__


class TestLaunches:
    """How the two kernels are launched when a shape repeats, and when it changes."""

    @pytest.fixture
    def kernels(self, monkeypatch: pytest.MonkeyPatch) -> tuple[Kernel, Kernel]:
        fused_images: Any = pytest.importorskip("saccade.kernels.fused_images")
        rows, patches = Kernel(num_parameters=7), Kernel(num_parameters=17)
        for kernel, name in ((rows, "job_rows_kernel"), (patches, "job_patches_kernel")):
            kernel.arg_names = tuple(getattr(fused_images, name).kernel.arg_names)
            monkeypatch.setattr(fused_images, name, kernel.launcher())
        return rows, patches

    @staticmethod
    def run() -> tuple[Any, list[torch.Tensor]]:
        from saccade.kernels.fused_images import JobKernels

        static = [torch.zeros(len(Column), MAX_JOBS, dtype=torch.int32)]
        static += [torch.zeros(64, dtype=torch.uint8) for _ in range(2)]
        return JobKernels(*static), static

    def test_every_argument_matches_its_kernel_parameter(self, kernels: tuple[Kernel, Kernel]) -> None:
        run, (table, pixels, scratch) = self.run()
        shape, out = replace(SHAPE, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6)), torch.zeros(20, 96)
        for counts in ((9, 8, 64), (30, 16, 400)):
            run(out, shape, counts)
        (grid, stream, given), (other, _, patches) = kernels[0].direct[0], kernels[1].direct[0]
        assert grid == (30, 3, 1) and other == (16, 2, 1) and stream == 7
        by_name = dict(zip(kernels[0].arg_names, given, strict=True))
        assert by_name == {
            "table_ptr": table.data_ptr(),
            "floats_ptr": table.data_ptr(),
            "pixels_ptr": pixels.data_ptr(),
            "scratch_ptr": scratch.data_ptr(),
            "JOBS": MAX_JOBS,
            "CUBIC": True,
            "BLOCK": 512,
        }
        by_name = dict(zip(kernels[1].arg_names, patches, strict=True))
        assert (by_name["scratch_ptr"], by_name["out_ptr"]) == (scratch.data_ptr(), out.data_ptr())
        assert by_name["out_stride"] == 96
        assert [by_name[f"{what}_{c}"] for what in ("mean", "std") for c in "rgb"] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
        assert [by_name[name] for name in ("PATCH", "TEMPORAL", "MERGE", "BLOCK")] == [4, 2, 2, 64]

    def test_only_the_same_shape_in_the_same_layout_is_launched_directly(self, kernels: tuple[Kernel, Kernel]) -> None:
        rows, patches = kernels
        run, _ = self.run()
        wide = torch.zeros(40, 192, dtype=torch.bfloat16)
        whole = wide[:, :96]
        run(whole[:10], SHAPE, (9, 8, 64))
        run(whole[10:], SHAPE, (9, 8, 64))
        assert len(patches.ordinary) == 1 and len(patches.direct) == 1
        others = [
            (wide[:, 1:97], SHAPE),
            (wide.view(80, 96), SHAPE),
            (whole.view(torch.float16), SHAPE),
            (whole, replace(SHAPE, mean=(0.5, 0.5, 0.25))),
            (whole, replace(SHAPE, std=(0.5, 0.5, 0.25))),
            (whole[:, :24], replace(SHAPE, patch=2)),
            (whole, replace(SHAPE, merge=1)),
            (whole[:, :48], replace(SHAPE, temporal_patch=1)),
            (whole, replace(SHAPE, resample="bilinear")),
        ]
        for count, (out, shape) in enumerate(others, start=2):
            run(out, shape, (9, 8, 64))
            assert len(patches.ordinary) == count and len(patches.direct) == 1
        assert len(rows.ordinary) == 2, "its arguments differ only by the filter"

    @pytest.mark.parametrize("num_values", [54, 150])
    def test_rows_of_the_wrong_width_are_refused(self, kernels: tuple[Kernel, Kernel], num_values: int) -> None:
        run, _ = self.run()
        with pytest.raises(AssertionError, match=f"patches have 96 values, rows {num_values}"):
            run(torch.zeros(20, num_values), SHAPE, (9, 8, 64))
        assert not any(kernel.ordinary for kernel in kernels)

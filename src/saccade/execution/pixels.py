"""Turns decoded pixels into patches: copies them through pinned host memory, never written during a copy, to static
device memory, where two kernels turn them into patches in the arena. Nothing is allocated after start-up."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saccade.graphs.staging import Staging
from saccade.inputs.text.chat_messages import MediaKind
from saccade.kernels.image_jobs import (
    MAX_JOBS,
    TABLE_BYTES,
    Column,
    ImageJob,
    PatchSettings,
    banded_jobs,
    whole_job,
    write_table,
)
from saccade.kernels.reference_images import resize_patchify
from saccade.scheduling.orders import PatchSource

Shapes = Mapping[MediaKind, PatchSettings]  # how pixels are cut, by media kind

SLOT_BYTES = 32 * 2**20  # pixels per copy; larger media are copied in bands
ALIGNMENT_BYTES = 16


class StagedPixels:
    """For GPUs. One copy takes as many pictures as fit into a slot, with a table that describes them; two launches do
    the rest. Larger pictures are copied in bands: slower, because copies wait for each other, but in bounded memory."""

    def __init__(self, device: torch.device, shapes: Shapes, slot_bytes: int = SLOT_BYTES) -> None:
        # Imported late: Triton is only installed where a GPU may be.
        from saccade.kernels.fused_images import JobKernels

        self._max_bytes, self._shapes = slot_bytes, shapes
        nbytes = TABLE_BYTES + slot_bytes
        self._staged = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        table_XJ = self._staged[:TABLE_BYTES].view(torch.int32).view(len(Column), MAX_JOBS)
        scratch = torch.zeros(slot_bytes, dtype=torch.uint8, device=device)
        self._run = JobKernels(table_XJ, self._staged[TABLE_BYTES:], scratch)
        self._slots = Staging(nbytes, device)

    def patchify(self, pictures: Sequence[PatchSource], out_PC: Tensor) -> None:
        for shape, jobs in rounds(pictures, self._shapes, self._max_bytes):
            _, slot = self._slots.next_slab()
            used, counts = write_slot(slot, jobs, shape)
            self._slots.send(self._staged, used)
            self._run(out_PC, shape, counts)


class PlainPixels:
    """For other devices. Takes one picture after the other."""

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes

    def patchify(self, pictures: Sequence[PatchSource], out_PC: Tensor) -> None:
        for picture in pictures:
            pixels = torch.from_numpy(np.array(picture.pixels))  # copied, because torch has no read-only tensors
            out = out_PC[picture.out_row : picture.out_row + picture.num_rows]
            resize_patchify(pixels, picture.size_hw, self._shapes[picture.kind], out)


def new_pixels(device: torch.device, shapes: Shapes) -> StagedPixels | PlainPixels:
    """Its `patchify` runs in order on the current stream."""
    return StagedPixels(device, shapes) if device.type == "cuda" else PlainPixels(shapes)


def rounds(
    pictures: Sequence[PatchSource], shapes: Shapes, max_bytes: int
) -> Iterator[tuple[PatchSettings, list[ImageJob]]]:
    """Groups of jobs that fit into one slot and one scratch buffer, and that are cut the same way."""
    pending: list[ImageJob] = []
    cut: PatchSettings | None = None
    pixels = scratch = 0
    for shape, job in _jobs(pictures, shapes, max_bytes):
        nbytes, scratch_bytes = _aligned(job.frames.nbytes), job.scratch_bytes
        is_full = pixels + nbytes > max_bytes or scratch + scratch_bytes > max_bytes or len(pending) == MAX_JOBS
        if pending and cut is not None and (is_full or shape != cut):
            yield cut, pending
            pending, pixels, scratch = [], 0, 0
        cut = shape
        pending.append(job)
        pixels, scratch = pixels + nbytes, scratch + scratch_bytes
    if pending and cut is not None:
        yield cut, pending


def write_slot(slot: NDArray[np.uint8], jobs: list[ImageJob], shape: PatchSettings) -> tuple[int, tuple[int, int, int]]:
    """Writes a round's table, followed by its pixels. Returns the bytes used and the table's counts."""
    places, end = [], 0
    for job in jobs:
        places.append(end)
        start = TABLE_BYTES + end
        slot[start : start + job.frames.nbytes].reshape(job.frames.shape)[...] = job.frames
        end += _aligned(job.frames.nbytes)
    table = slot[:TABLE_BYTES].view(np.int32).reshape(-1, MAX_JOBS)
    return TABLE_BYTES + min(end, len(slot) - TABLE_BYTES), write_table(table, jobs, places, shape)


def _jobs(pictures: Sequence[PatchSource], shapes: Shapes, max_bytes: int) -> Iterator[tuple[PatchSettings, ImageJob]]:
    for picture in pictures:
        shape = shapes[picture.kind]
        job = whole_job(picture.frames, picture.size_hw, picture.out_row, shape)
        if max(_aligned(job.frames.nbytes), job.scratch_bytes) <= max_bytes:
            yield shape, job
        else:
            limit = max_bytes - ALIGNMENT_BYTES
            for band in banded_jobs(picture.frames, picture.size_hw, picture.out_row, shape, limit):
                yield shape, band


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def warm_up_picture(kind: MediaKind, shape: PatchSettings) -> PatchSource:
    """The smallest picture that runs both kernels."""
    side = shape.patch * shape.merge
    frames: Any = np.zeros((shape.temporal_patch, 2 * side, side, 3), dtype=np.uint8)
    return PatchSource(0, kind, frames, (side, side), 0, (side // shape.patch) ** 2)

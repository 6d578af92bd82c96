"""Decodes media in processes that can be killed.

A file that is certain to be cheap is decoded in the calling thread: for a 560x560 JPEG, the way to another process and
back takes 2 ms, more than decoding (1.5 ms). A JPEG is cheap if its headers prove that decoding takes at most about 30
ms, whatever its data (see `is_cheap`). All other files go to the pool, because their cost is large or unknown."""

import math
from itertools import pairwise
from typing import Any, NoReturn

import msgspec

from saccade.errors import CapacityError, RequestError
from saccade.inputs.allowance import Allowance
from saccade.inputs.media.animations import measure_animation
from saccade.inputs.media.containers import MAX_DECODE_S, MAX_DECODED_FRAMES
from saccade.inputs.media.headers import read_header
from saccade.inputs.media.images import (
    PIXEL_BYTES,
    SCRATCH_BYTES,
    ImageLimits,
    MeasuredImage,
    Pixels,
    decode_image,
)
from saccade.inputs.media.jpeg import is_cheap
from saccade.inputs.media.media_process import MediaJob, MediaResult
from saccade.inputs.media.sampling import Sample
from saccade.inputs.media.videos import load_video, read_video
from saccade.jobs.pool import Pool, PoolClosedError
from saccade.jobs.pool_process import JobKilledError, JobLimits, JobOutput, ProcessLostError, is_supported
from saccade.machine import usable_cores
from saccade.models.media import VideoSettings

MODULE = "saccade.inputs.media.media_process"
MAX_PROCESSES = 8
BASE_BYTES = 384 * 2**20  # address space of libraries and decoders, besides what grows with the pixels
IMAGE_CPU_S, VIDEO_CPU_S = 3.0, 1.5 * MAX_DECODE_S
PIXELS_PER_S, BYTES_PER_S = 20e6, 20e6  # rates of slow decoders on a slow core
SLACK = 2.0
SHORT_BYTES = 256 * 2**10  # the frames of a shorter animation are counted before it waits for a process
MAX_FRAME_BYTES = 3 * 2**30


class MediaPool:
    """Threads may share it; each waits for its own media."""

    def __init__(self, num_processes: int = 0) -> None:
        """`num_processes=0` starts one process per core, from 2 to 8."""
        self.pool = Pool(MODULE, max(2, num_processes or min(usable_cores(), MAX_PROCESSES)))

    @staticmethod
    def is_supported() -> bool:
        return is_supported()

    def close(self) -> None:
        self.pool.close()

    def image(self, measured: MeasuredImage, limits: ImageLimits, allowance: Allowance) -> Pixels:
        """Like `decode_image`. The caller has already held the memory (see `needed_bytes`)."""
        data = measured.source
        if not isinstance(data, bytes) or (measured.header and measured.header.format == "JPEG" and is_cheap(data)):
            return decode_image(measured)
        cost_s = measured.num_pixels / PIXELS_PER_S + len(data) / BYTES_PER_S
        bounds = JobLimits(
            cpu_s=IMAGE_CPU_S + SLACK * cost_s,
            memory_bytes=BASE_BYTES + len(data) + (PIXEL_BYTES + SCRATCH_BYTES) * measured.num_pixels,
            max_output_bytes=PIXEL_BYTES * measured.num_pixels,
        )
        job = MediaJob(False, [], None, limits)
        pixels, _, _ = self._run("image", job, (data,), bounds, cost_s, allowance)
        return pixels

    def video(
        self, source: Any, limits: ImageLimits, allowance: Allowance, settings: VideoSettings | None = None
    ) -> tuple[Pixels, float | None, Sample | None]:
        """Like `load_video`. A source that is neither a file nor a list of files is read in this process."""
        video = read_video(source, limits)
        if isinstance(video, bytes):
            job, data = MediaJob(True, [], None, limits, settings), (video,)
        elif isinstance(frames := video.frames, list) and frames and all(isinstance(frame, bytes) for frame in frames):
            job, data = MediaJob(True, list(map(len, frames)), video.fps, limits), tuple(frames)
        else:
            return load_video(video, limits, allowance)
        num_bytes = sum(map(len, data))
        num_pixels = _known_pixels(data[0], len(job.sizes))
        cost_s = math.inf if num_pixels is None else num_pixels / PIXELS_PER_S + num_bytes / BYTES_PER_S
        bounds = JobLimits(
            cpu_s=min(VIDEO_CPU_S, IMAGE_CPU_S + SLACK * cost_s),
            memory_bytes=BASE_BYTES + num_bytes,
            max_output_bytes=MAX_FRAME_BYTES,
        )
        return self._run("video", job, data, bounds, min(cost_s, VIDEO_CPU_S), allowance)

    def _run(
        self,
        kind: str,
        job: MediaJob,
        data: tuple[bytes, ...],
        bounds: JobLimits,
        cost_s: float,
        allowance: Allowance,
    ) -> tuple[Pixels, float | None, Sample | None]:
        words = msgspec.msgpack.encode(job)
        try:
            with allowance.waiting():
                output = self.pool.run(
                    words,
                    data,
                    bounds,
                    cost_s=cost_s,
                    caller=allowance.caller,
                    hold=allowance.hold,
                    check_cancelled=allowance.check_cancelled,
                )
            return _read(output, is_video=job.is_video)
        except JobKilledError as error:
            _refuse(kind, error)
        except (ProcessLostError, PoolClosedError):
            raise CapacityError(f"the process that decoded the {kind} has ended; try again") from None


def _known_pixels(data: bytes, num_frames: int) -> int | None:
    """The pixels of all frames: of a list of images, all as large as the first, or of a short animation. None if only a
    decoder can tell, as for a video file, where a few bytes can be hours."""
    header = read_header(data)
    if header is None:
        return None
    if num_frames or header.format not in ("GIF", "WEBP"):
        return max(num_frames, 1) * header.height * header.width
    if len(data) > SHORT_BYTES:
        return None
    found = measure_animation(data, header.height, header.width)
    return max(found.num_frames, 1) * found.height * found.width


def _read(output: JobOutput, *, is_video: bool) -> tuple[Pixels, float | None, Sample | None]:
    """Checks the process's reply like any other input, because the process works on untrusted data."""
    try:
        result = msgspec.msgpack.decode(output.words, type=MediaResult)
    except msgspec.MsgspecError:
        raise ProcessLostError("its reply cannot be decoded") from None
    shape, fps, sample = result.shape, result.fps, result.sample
    if fps is not None and not 0 < fps < math.inf:
        raise ProcessLostError(f"its rate is {fps}")
    if len(shape) != 3 + is_video or shape[-1] != 3 or min(shape) < 1 or math.prod(shape) != len(output.data):
        raise ProcessLostError(f"its result has the shape {shape}")
    if sample is not None and not _is_of(sample, shape[0]):
        raise ProcessLostError("its sample does not match its frames")
    return output.data.reshape(shape), fps, sample


def _is_of(sample: Sample, num_decoded: int) -> bool:
    ends = (-1, *sample.frames, sample.num_frames, MAX_DECODED_FRAMES + 1)
    return len(sample.frames) == num_decoded and all(a < b for a, b in pairwise(ends))


def _refuse(kind: str, error: JobKilledError) -> NoReturn:
    if error.reason == "memory":
        message = f"the {kind} needs more memory to decode than its size allows; re-encode it with a standard encoder"
        raise RequestError(message, code=f"{kind}_too_complex", status=413) from None
    if error.reason == "crash":
        raise RequestError(f"the {kind} is damaged: it crashed its decoder", code=f"{kind}_invalid") from None
    message = f"the {kind} takes too long to decode ({error}); send a smaller or simpler one"
    raise RequestError(message, code=f"{kind}_too_complex", status=413) from None

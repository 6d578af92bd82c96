"""A process that decodes media for a `MediaPool`: `python -m saccade.inputs.media.media_process SOCKET`.

It imports neither torch nor a tokenizer, so it starts in a third of a second and takes some 40 MB."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate, pairwise
from typing import Any

import msgspec

from saccade.inputs.allowance import Allowance
from saccade.inputs.media.images import ImageLimits, decode_image, measure_image
from saccade.inputs.media.videos import Video, load_video
from saccade.jobs.job_process import Desk, main


class MediaJob(msgspec.Struct, frozen=True):
    """What to decode: an image, a video file, or a video of images whose bytes lie one behind the other."""

    is_video: bool
    sizes: list[int]  # of the frames, in bytes; empty for a file
    fps: float | None
    limits: dict[str, Any]

    @classmethod
    def of(cls, *, limits: ImageLimits, frames: Sequence[bytes] = (), is_video: bool, fps: float | None) -> "MediaJob":
        return cls(is_video, [len(frame) for frame in frames], fps, asdict(limits))


class MediaResult(msgspec.Struct, frozen=True):
    shape: tuple[int, ...]
    fps: float | None


def work(words: bytes, data: bytes, desk: Desk) -> bytes:
    job = msgspec.msgpack.decode(words, type=MediaJob)
    limits = ImageLimits(**job.limits)
    if not job.is_video:
        result = MediaResult(decode_image(measure_image(data, limits), desk.array).shape, None)
    else:
        video = Video(_split(data, job.sizes), job.fps) if job.sizes else data
        frames, fps = load_video(video, limits, Allowance(hold=desk.hold), desk.array)
        result = MediaResult(frames.shape, fps)
    return msgspec.msgpack.encode(result)


def _split(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    return [data[start:end] for start, end in pairwise(accumulate(sizes, initial=0))]


if __name__ == "__main__":
    sys.exit(main(work))

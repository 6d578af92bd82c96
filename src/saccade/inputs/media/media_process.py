"""A process that decodes media for a `MediaPool`: `python -m saccade.inputs.media.media_process SOCKET`.

It imports neither torch nor a tokenizer, so it starts in a third of a second and takes about 40 MB."""

import sys
from collections.abc import Sequence
from itertools import accumulate, pairwise

import msgspec

from saccade.inputs.allowance import Allowance
from saccade.inputs.media.images import ImageLimits, decode_image, measure_image
from saccade.inputs.media.sampling import Sample
from saccade.inputs.media.videos import Video, load_video
from saccade.jobs.job_process import Desk, main
from saccade.models.media import VideoSettings


class MediaJob(msgspec.Struct, frozen=True):
    """What to decode: an image, a video file, or a video as images whose files are concatenated."""

    is_video: bool
    sizes: list[int]  # bytes of each frame's file; empty for an image or video file
    fps: float | None
    limits: ImageLimits
    settings: VideoSettings | None = None


class MediaResult(msgspec.Struct, frozen=True):
    shape: tuple[int, ...]
    fps: float | None
    sample: Sample | None = None


def work(words: bytes, data: bytes, desk: Desk) -> bytes:
    job = msgspec.msgpack.decode(words, type=MediaJob)
    if not job.is_video:
        result = MediaResult(decode_image(measure_image(data, job.limits), desk.array).shape, None)
    else:
        video = Video(_split(data, job.sizes), job.fps) if job.sizes else data
        frames, fps, sample = load_video(video, job.limits, Allowance(hold=desk.hold), desk.array, job.settings)
        result = MediaResult(frames.shape, fps, sample)
    return msgspec.msgpack.encode(result)


def _split(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    return [data[start:end] for start, end in pairwise(accumulate(sizes, initial=0))]


if __name__ == "__main__":
    sys.exit(main(work))

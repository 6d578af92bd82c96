"""Decodes the videos of a request into RGB frames: one uint8 array of shape (frames, height, width, 3). Frames come as
an array, as a list of images, or in a file (see containers.py). The number of frames is checked before any is decoded,
and all frames must have the size of the first."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from saccade.errors import RequestError
from saccade.inputs.allowance import ANYTHING, Allowance
from saccade.inputs.media.containers import FRAME_BYTES, decode_video, invalid_video
from saccade.inputs.media.images import (
    SCRATCH_BYTES,
    ImageLimits,
    ImageSource,
    NewPixels,
    decode_image,
    measure_image,
    new_pixels,
    read_data_url,
    too_large,
)
from saccade.inputs.media.sampling import Sample
from saccade.models.media import VideoSettings

_SIZES = "all frames of a video must have the same size"


@dataclass(frozen=True, slots=True)
class Video:
    """Frames in order and their rate, None if unknown."""

    frames: Sequence[ImageSource] | npt.NDArray[Any] = field(repr=False)
    fps: float | None = None


VideoSource = Video | str | bytes | os.PathLike[str] | Sequence[ImageSource] | npt.NDArray[Any]


def load_video(
    video: VideoSource,
    limits: ImageLimits,
    allowance: Allowance = ANYTHING,
    new: NewPixels = new_pixels,
    settings: VideoSettings | None = None,
) -> tuple[npt.NDArray[np.uint8], float | None, Sample | None]:
    """Frames and rate, and which frames they are if `settings` sampled them from a file. Bytes and paths are video
    files; a string is a data URL (see `read_video_url`). A video array is returned as it is; otherwise the frames are
    in the array that the last call of `new` returned."""
    found, sample = read_video(video, limits), None
    if isinstance(found, bytes):
        frames, fps, sample = decode_video(found, limits, allowance, new, settings)
        found = Video(frames, fps)
    _check_fps(found.fps)
    return _load_frames(found.frames, limits, allowance, new), found.fps, sample


def read_video(video: VideoSource, limits: ImageLimits) -> bytes | Video:
    """The bytes of a video file, or frames that may still be encoded."""
    if isinstance(video, str):
        video = read_video_url(video, limits)
    if isinstance(video, os.PathLike):
        return _read_file(Path(video), limits)
    if isinstance(video, bytes | bytearray | memoryview):
        return bytes(video)
    return video if isinstance(video, Video) else Video(video)


def read_video_url(url: str, limits: ImageLimits) -> bytes | list[bytes]:
    """The bytes of a data URL of a video file, or of JPEG frames (data:video/jpeg;base64,frame,frame,...)."""
    head, comma, body = url.partition(",")
    if not comma or head[:5].lower() != "data:":
        message = "a video URL must be a data URL of a file or of JPEG frames (data:video/jpeg;base64,frame,frame,...)"
        raise RequestError(message, code="video_unsupported")
    if head[:15].lower() != "data:video/jpeg":
        return read_data_url(url, limits)
    check_frames(body.count(",") + 1, limits)
    frames: list[bytes] = []
    left = limits.max_video_bytes
    for text in body.split(","):
        frames.append(read_data_url(f"{head},{text}", limits))
        left -= len(frames[-1])
        if left < 0:
            raise too_large("the video", limits.max_video_bytes)
    return frames


def measure_frames(video: object, limits: ImageLimits) -> tuple[int, int, int, float | None] | None:
    """The number of frames, height and width of the first, and rate; None if only a decoder can tell."""
    frames, fps = (video.frames, video.fps) if isinstance(video, Video) else (video, None)
    if not isinstance(frames, list | tuple) or len(frames) == 0:
        return None
    _check_fps(fps)
    check_frames(len(frames), limits)
    first = measure_image(frames[0], limits)
    _check_pixels(len(frames), first.height, first.width, limits)
    return len(frames), first.height, first.width, fps


def _load_frames(
    frames: Sequence[ImageSource] | npt.NDArray[Any], limits: ImageLimits, allowance: Allowance, new: NewPixels
) -> npt.NDArray[np.uint8]:
    if not isinstance(frames, np.ndarray | list | tuple) or len(frames) == 0:
        raise invalid_video("a video must be a list of frames or an array of shape (frames, height, width, 3)")
    check_frames(len(frames), limits)
    if isinstance(frames, np.ndarray) and (frames.ndim != 4 or frames.dtype != np.uint8 or frames.shape[3] != 3):
        raise invalid_video("a video array must be uint8 of shape (frames, height, width, 3)")
    size = measure_image(frames[0], limits)
    _check_pixels(len(frames), size.height, size.width, limits)
    if isinstance(frames, np.ndarray):
        return frames
    allowance.hold((SCRATCH_BYTES + FRAME_BYTES * len(frames)) * size.num_pixels)
    first = decode_image(size)
    stack = new((len(frames), *first.shape))
    stack[0] = first
    for index, frame in enumerate(frames[1:], start=1):
        allowance.check_cancelled()
        measured = measure_image(frame, limits)
        if measured.num_pixels != size.num_pixels:
            raise invalid_video(_SIZES)
        pixels = decode_image(measured)
        if pixels.shape != first.shape:
            raise invalid_video(_SIZES)
        stack[index] = pixels
    return stack


def _check_fps(fps: float | None) -> None:
    if fps is not None and not (math.isfinite(fps) and fps > 0):
        raise invalid_video("fps must be a positive number")


def _check_pixels(num_frames: int, height: int, width: int, limits: ImageLimits) -> None:
    if num_frames * height * width > limits.max_video_pixels:
        problem, limit = f"the video has {num_frames} frames of {width}x{height} pixels", limits.max_video_pixels
        raise RequestError(f"{problem}; the limit is {limit} pixels in all", code="video_too_large", status=413)


def check_frames(num_frames: int, limits: ImageLimits) -> None:
    if num_frames > limits.max_frames:
        message = f"the video has {num_frames} frames; the limit is {limits.max_frames}: send fewer frames"
        raise RequestError(message, code="video_too_long", status=413)


def _read_file(path: Path, limits: ImageLimits) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(limits.max_video_bytes + 1)
    except OSError:
        raise invalid_video("the video file cannot be read") from None
    if len(data) > limits.max_video_bytes:
        message = f"the video file has more than {limits.max_video_bytes} bytes, which is the limit: cut or compress it"
        raise RequestError(message, code="video_too_large", status=413)
    return data

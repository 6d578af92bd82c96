"""Chooses the frames of a video, by the rules of the model families' own processors."""

import math
from dataclasses import dataclass

import numpy as np

from saccade.errors import RequestError
from saccade.models.media import VideoSettings


@dataclass(frozen=True, slots=True)
class Sample:
    """The indices of the decoded frames among the `num_frames` of a video."""

    frames: tuple[int, ...]
    num_frames: int


def sample_frames(num_frames: int, fps: float, settings: VideoSettings) -> tuple[int, ...]:
    if not settings.is_sampled:
        if num_frames > settings.max_frames:
            message = f"the video has {num_frames} frames; the limit is {settings.max_frames}: send fewer frames"
            raise RequestError(message, code="video_too_long")
        return tuple(range(num_frames))
    if settings.budget == "video":
        return _sample_evenly(num_frames, fps, settings)
    return _sample_by_step(num_frames, fps, settings)


def _sample_evenly(num_frames: int, fps: float, settings: VideoSettings) -> tuple[int, ...]:
    """Evenly spaced from the first frame to the last (Qwen3-VL)."""
    wanted = settings.num_frames
    if wanted is None:
        wanted = num_frames if settings.fps is None else int(num_frames / fps * settings.fps)
        wanted = max(wanted, settings.min_frames)
    wanted = max(1, min(wanted, settings.max_frames, num_frames))
    return tuple(np.linspace(0, num_frames - 1, wanted).round().astype(int).tolist())


def _sample_by_step(num_frames: int, fps: float, settings: VideoSettings) -> tuple[int, ...]:
    """A multiple of the temporal patch, at constant steps from the first frame (Qwen2.5-VL)."""
    unit = settings.temporal_patch
    most = min(settings.max_frames, num_frames) // unit * unit
    if settings.num_frames is not None:
        wanted = min(round(settings.num_frames / unit) * unit, most)
    elif settings.fps is not None:
        wanted = math.floor(min(max(num_frames / fps * settings.fps, settings.min_frames), most) / unit) * unit
    else:
        wanted = most
    if wanted < unit:
        return tuple(range(min(num_frames, settings.max_frames)))
    # float32 before truncation, like torch.arange: 2.9999999 is frame 3.
    steps = np.arange(0, num_frames, num_frames / wanted).astype(np.float32).astype(int)
    return tuple(np.minimum(steps, num_frames - 1).tolist())

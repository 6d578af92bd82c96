"""Target size, patch grid and token count of an image or video, from its size alone. These are the rules of the model
families' own processors, including their rounding (Python's round: half to even), so that grids and token counts match
transformers for every size."""

import math
from dataclasses import dataclass

from saccade.errors import RequestError
from saccade.inputs.media.sampling import sample_frames
from saccade.models.media import ImageSettings, VideoSettings

MAX_ASPECT = 200
_DEFAULT_FPS = 24.0  # assumed by transformers if a video's rate is unknown


@dataclass(frozen=True, slots=True)
class MediaPlan:
    """How an image or video is resized. `grid_thw` counts patches; `num_tokens` rows reach the language model. A video
    is sampled, too: `frames` are indices into the given frames, and the last is repeated to fill the temporal patch.
    `timestamps` has the seconds of each time step, `second_per_grid` their mean distance."""

    size_hw: tuple[int, int]
    grid_thw: tuple[int, int, int]
    num_patches: int
    num_tokens: int
    frames: tuple[int, ...] = ()
    timestamps: tuple[float, ...] = ()
    second_per_grid: float = 0.0


def plan_image(height: int, width: int, settings: ImageSettings) -> MediaPlan:
    size = settings.fixed_size or smart_resize(
        height,
        width,
        factor=settings.patch * settings.merge,
        min_pixels=settings.min_pixels,
        max_pixels=settings.max_pixels,
    )
    grid = (1, size[0] // settings.patch, size[1] // settings.patch)
    num_patches = grid[1] * grid[2]
    return MediaPlan(size, grid, num_patches, num_patches // settings.merge**2)


def plan_video(
    num_frames: int,
    height: int,
    width: int,
    fps: float | None,
    settings: VideoSettings,
    sampled: tuple[int, ...] | None = None,
) -> MediaPlan:
    """`sampled` are the frames to use, if they are chosen already."""
    rate = _DEFAULT_FPS if fps is None else fps
    frames = sample_frames(num_frames, rate, settings) if sampled is None else sampled
    size = _video_size(len(frames), height, width, settings)
    padded = frames + frames[-1:] * (-len(frames) % settings.temporal_patch)
    grid = (len(padded) // settings.temporal_patch, size[0] // settings.patch, size[1] // settings.patch)
    num_patches = math.prod(grid)
    return MediaPlan(
        size_hw=size,
        grid_thw=grid,
        num_patches=num_patches,
        num_tokens=num_patches // settings.merge**2,
        frames=padded,
        timestamps=_timestamps(padded, rate, settings.temporal_patch),
        second_per_grid=settings.temporal_patch / (len(frames) / num_frames * rate),
    )


def smart_resize(height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """(height, width) in multiples of `factor`, with the area within the bounds and nearly the same aspect ratio."""
    _check_aspect(height, width)
    return _fit(height, width, 1, 1, factor, min_pixels, max_pixels)


def smart_resize_video(
    num_frames: int, height: int, width: int, *, temporal: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Like smart_resize, but the bounds are for all frames together. Sides below `factor` are scaled up first."""
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    _check_aspect(height, width)
    rounded = round(num_frames / temporal) * temporal
    return _fit(height, width, num_frames, rounded, factor, min_pixels, max_pixels)


def _fit(
    height: int, width: int, frames: int, rounded_frames: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    high = round(height / factor) * factor
    wide = round(width / factor) * factor
    if rounded_frames * high * wide > max_pixels:
        shrink = math.sqrt(frames * height * width / max_pixels)
        high = math.floor(height / shrink / factor) * factor
        wide = math.floor(width / shrink / factor) * factor
    elif rounded_frames * high * wide < min_pixels:
        grow = math.sqrt(min_pixels / (frames * height * width))
        high = math.ceil(height * grow / factor) * factor
        wide = math.ceil(width * grow / factor) * factor
    # The shorter side of a long image may shrink to zero, but a vision tower cannot take an empty image.
    return max(factor, high), max(factor, wide)


def _video_size(num_frames: int, height: int, width: int, settings: VideoSettings) -> tuple[int, int]:
    factor = settings.patch * settings.merge
    low, high = settings.min_pixels, settings.max_pixels
    floor = int(low * 1.05)
    if settings.budget == "frame":
        if settings.is_capped:
            total = int(settings.max_video_tokens * factor * factor * 0.9)
            high = max(min(high, total * settings.temporal_patch // num_frames), floor)
        return smart_resize(height, width, factor=factor, min_pixels=low, max_pixels=high)
    frames = max(num_frames, settings.temporal_patch)
    if settings.is_capped:
        high = frames * max(min(settings.max_video_tokens * factor * factor, high // frames), floor)
    return smart_resize_video(
        frames, height, width, temporal=settings.temporal_patch, factor=factor, min_pixels=low, max_pixels=high
    )


def _timestamps(frames: tuple[int, ...], fps: float, unit: int) -> tuple[float, ...]:
    """The midpoint in seconds between the first and last frame of each group."""
    seconds = [frame / fps for frame in frames]
    return tuple((seconds[i] + seconds[i + unit - 1]) / 2 for i in range(0, len(seconds), unit))


def _check_aspect(height: int, width: int) -> None:
    if max(height, width) / min(height, width) > MAX_ASPECT:
        message = f"the image is {width}x{height} pixels; the longer side may be at most {MAX_ASPECT} times the shorter"
        raise RequestError(message, code="image_aspect_ratio")

"""How images and videos become patches, and their placeholder text. A checkpoint's JSON files override these values."""

from dataclasses import dataclass, replace
from typing import Literal

from saccade.kernels.image_jobs import PatchSettings, Triple

CLIP_MEAN: Triple = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Triple = (0.26862954, 0.26130258, 0.27577711)
HALF: Triple = (0.5, 0.5, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSettings(PatchSettings):
    """How an image becomes patches.

    `fixed_size` (height, width) stretches every image to one size. Without it an image roughly keeps its aspect ratio,
    each side becomes a multiple of patch * merge, and the area stays between min_pixels and max_pixels.
    """

    min_pixels: int = 1
    max_pixels: int = 2**31
    fixed_size: tuple[int, int] | None = None

    @property
    def fingerprint(self) -> bytes:
        """Every setting except the pixel bounds, for a digest. The bounds only affect the size of the image, which the
        digest must include."""
        return repr(replace(self, min_pixels=1, max_pixels=1)).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoSettings(PatchSettings):
    """How a video becomes patches.

    min_pixels and max_pixels apply to one frame (Qwen2.5-VL) or to the whole video (Qwen3-VL), depending on `budget`.
    `is_sampled` picks frames at `fps` (or `num_frames` of them); without it every frame is used. With `is_capped` the
    pixels of a frame also stay within its share of max_video_tokens.
    """

    min_pixels: int
    max_pixels: int
    budget: Literal["frame", "video"]
    is_sampled: bool
    fps: float | None
    num_frames: int | None
    min_frames: int
    max_frames: int
    is_capped: bool
    max_video_tokens: int

    @property
    def fingerprint(self) -> bytes:
        return repr(self).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholders:
    """The text around images and videos, and how positions run through them.

    A chat template writes `image_marker` for an image. It is replaced by `image_text`, whose image token is repeated
    for every feature row. Videos work alike; with `has_timestamps` their text is written once per frame group, with its
    time. A model with `has_pixel_places` names places in pixels of the resized image, others in thousandths of its
    sides.
    """

    image_marker: str
    image_text: str
    video_marker: str | None = None
    video_text: str | None = None
    has_timestamps: bool = False
    is_mrope: bool = False
    is_bidirectional: bool = False
    has_pixel_places: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaDefaults:
    """A family's media settings, for what the files of a checkpoint leave out."""

    image: ImageSettings
    video: VideoSettings | None = None
    placeholders: Placeholders

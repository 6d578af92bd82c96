"""A checkpoint's settings for images, videos and their placeholder tokens. Missing fields take the defaults of the
model family, which match transformers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isqrt
from pathlib import Path
from typing import Any

from saccade.errors import ConfigError
from saccade.inputs.checkpoint_files import read_json, read_optional_json
from saccade.kernels.image_jobs import Resample, Triple
from saccade.models.media import ImageSettings, MediaDefaults, Placeholders, VideoSettings
from saccade.models.registry import find_family

MAX_COUNT = 2**40
_RESAMPLE: dict[int, Resample] = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceholderSettings(Placeholders):
    """The tokens that stand for images and videos. A token covers `merge` x `merge` patches."""

    image_token_id: int
    video_token_id: int | None
    merge: int
    tokens_per_second: float | None


def read_image_settings(folder: Path) -> ImageSettings | None:
    """None if the model takes no images."""
    media = _media_defaults(folder)
    if media is None:
        return None
    raw = _processor_dict(folder, "image_processor", "preprocessor_config.json")
    if raw.get("do_pan_and_scan"):
        raise ConfigError(f"{folder}: do_pan_and_scan is on; only whole images are supported, turn it off")
    base = _pixel_fields(raw, media.image, folder)
    if media.image.fixed_size is not None:
        return ImageSettings(**_fixed_fields(base, raw, folder, media.image))
    return ImageSettings(**base, **_area(raw, media.image, folder))


def read_video_settings(folder: Path) -> VideoSettings | None:
    """None if the model takes no videos."""
    media = _media_defaults(folder)
    if media is None or media.video is None:
        return None
    # Like transformers, reads the image settings if there are no video settings.
    raw = _processor_dict(folder, "video_processor", "video_preprocessor_config.json", "preprocessor_config.json")
    default = media.video
    # The processor whose bounds are those of whole videos knows no other name for them.
    bounds = raw if default.budget == "frame" else {"size": raw.get("size")}
    return VideoSettings(
        **_pixel_fields(raw, default, folder),
        **_area(bounds, default, folder),
        budget=default.budget,
        is_sampled=bool(_get(raw, "do_sample_frames", default.is_sampled)),
        fps=_positive(raw, "fps", default.fps, folder),
        num_frames=_count(raw, "num_frames", 1, folder) if raw.get("num_frames") is not None else None,
        min_frames=_count(raw, "min_frames", default.min_frames, folder),
        max_frames=_count(raw, "max_frames", default.max_frames, folder),
        is_capped=bool(raw.get("cap_pixels_per_frame")),
        max_video_tokens=_count(raw, "max_video_tokens", default.max_video_tokens, folder),
    )


def read_placeholder_settings(folder: Path) -> PlaceholderSettings | None:
    """None if the model takes no images."""
    media = _media_defaults(folder)
    if media is None:
        return None
    config = _model_config(folder)
    has_times = media.placeholders.has_timestamps
    return PlaceholderSettings(
        **asdict(media.placeholders),
        image_token_id=_token_id(config, folder, "image_token_id", "image_token_index"),
        video_token_id=_token_id(config, folder, "video_token_id") if media.video else None,
        merge=_merge(config, folder),
        tokens_per_second=None if has_times else _positive(config["vision_config"], "tokens_per_second", None, folder),
    )


def _media_defaults(folder: Path) -> MediaDefaults | None:
    """The defaults of the checkpoint's family, or None for a text model."""
    family = find_family(read_json(folder / "config.json"))
    return None if family is None else family.media


def _processor_dict(folder: Path, nested: str, *names: str) -> dict[str, Any]:
    """The first processor settings found, in the order of transformers: processor_config.json first."""
    part = read_optional_json(folder / "processor_config.json").get(nested)
    if isinstance(part, dict):
        return part
    for name in names:
        if (folder / name).is_file():
            return read_json(folder / name)
    raise ConfigError(
        f"{folder} has no {names[0]}; a model that takes images needs it or processor_config.json from its checkpoint"
    )


def _pixel_fields(raw: dict[str, Any], default: ImageSettings | VideoSettings, folder: Path) -> dict[str, Any]:
    resample = raw.get("resample")
    if resample is not None and (type(resample) is not int or resample not in _RESAMPLE):
        raise ConfigError(f"{folder}: resample {resample!r} is not supported; 2 (bilinear) and 3 (bicubic) are")
    if abs((_positive(raw, "rescale_factor", 1 / 255, folder) or 0) - 1 / 255) > 1e-6:
        raise ConfigError(f"{folder}: rescale_factor {raw['rescale_factor']!r} is not supported; 1/255 is")
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if not raw.get(name, True):  # as in transformers, null is off
            raise ConfigError(f"{folder}: {name} is off, which is not supported; set it to true")
    return {
        "patch": _count(raw, "patch_size", default.patch, folder),
        "temporal_patch": _count(raw, "temporal_patch_size", default.temporal_patch, folder),
        "merge": _count(raw, "merge_size", default.merge, folder),
        "mean": _triple(_get(raw, "image_mean", default.mean), folder),
        "std": _triple(_get(raw, "image_std", default.std), folder, is_divisor=True),
        "resample": default.resample if resample is None else _RESAMPLE[resample],
    }


def _area(raw: dict[str, Any], default: ImageSettings | VideoSettings, folder: Path) -> dict[str, Any]:
    size = _get(raw, "size", {"shortest_edge": default.min_pixels, "longest_edge": default.max_pixels})
    edges = size if isinstance(size, dict) else {}
    low = _get(raw, "min_pixels", edges.get("shortest_edge"))
    high = _get(raw, "max_pixels", edges.get("longest_edge"))
    if not low or not high:
        raise ConfigError(
            f"{folder}: size {size!r} is not supported; shortest_edge and longest_edge are, as numbers of pixels"
        )
    found = {"min_pixels": low, "max_pixels": high}
    return {name: _count(found, name, 1, folder) for name in found}


def _fixed_fields(base: dict[str, Any], raw: dict[str, Any], folder: Path, default: ImageSettings) -> dict[str, Any]:
    """For a vision tower with one image size: config.json has its patch size, not the processor settings."""
    config = _model_config(folder)
    return base | {
        "patch": _count(config["vision_config"], "patch_size", None, folder),
        "fixed_size": _height_width(raw.get("size"), folder) or default.fixed_size,
        "merge": _merge(config, folder),
    }


def _height_width(size: Any, folder: Path) -> tuple[int, int] | None:
    """A number is the side of a square."""
    if size is None:
        return None
    sides: tuple[Any, Any] = (size.get("height"), size.get("width")) if isinstance(size, dict) else (size, size)
    if not all(type(side) is int and side > 0 for side in sides):
        raise ConfigError(f"{folder}: size {size!r} is not supported; height and width are")
    return sides


def _model_config(folder: Path) -> dict[str, Any]:
    """config.json completed by the model's defaults, so that processor and model agree on the number of rows."""
    given = {"vision_config": {}} | read_json(folder / "config.json")
    family = find_family(given)
    assert family is not None, "its media have defaults"
    config = family.defaults.complete(given)
    if not isinstance(config["vision_config"], dict):
        raise ConfigError(f"{folder / 'config.json'}: vision_config must be a JSON object")
    return config


def _merge(config: dict[str, Any], folder: Path) -> int:
    """A token covers this many patches per side: spatial_merge_size, or derived from mm_tokens_per_image."""
    vision = config["vision_config"]
    if "mm_tokens_per_image" not in config:
        return _count(vision, "spatial_merge_size", None, folder)
    per_side = isqrt(_count(config, "mm_tokens_per_image", None, folder))
    return _count(vision, "image_size", None, folder) // _count(vision, "patch_size", None, folder) // per_side


def _token_id(config: dict[str, Any], folder: Path, *names: str) -> int:
    for name in names:
        if isinstance(config.get(name), int):
            return int(config[name])
    raise ConfigError(f"{folder / 'config.json'} has no {names[0]}; a vision-language checkpoint was expected")


def _triple(values: Any, folder: Path, *, is_divisor: bool = False) -> Triple:
    is_list = isinstance(values, list | tuple) and len(values) == 3
    if not is_list or not all(_is_finite(value) and not (is_divisor and value == 0) for value in values):
        raise ConfigError(f"{folder}: image_mean and image_std must be three numbers; got {values!r:.200}")
    return (float(values[0]), float(values[1]), float(values[2]))


def _count(raw: Mapping[str, Any], name: str, default: int | None, folder: Path) -> int:
    value = _get(raw, name, default)
    if value is None:
        raise ConfigError(f"{folder}: {name} is missing")
    if not _is_finite(value) or value != int(value) or not 1 <= value <= MAX_COUNT:
        raise ConfigError(f"{folder}: {name} is {value!r:.200}; a whole number from 1 to {MAX_COUNT} is needed")
    return int(value)


def _positive(raw: Mapping[str, Any], name: str, default: float | None, folder: Path) -> float | None:
    value: float | None = _get(raw, name, default)
    if value is not None and not (_is_finite(value) and value > 0):
        raise ConfigError(f"{folder}: {name} is {value!r:.200}; a number above 0 is needed")
    return value


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300  # float() overflows on huge integers


def _get(raw: Mapping[str, Any], name: str, default: Any) -> Any:
    """A field of a JSON object; null means the default."""
    value = raw.get(name)
    return default if value is None else value

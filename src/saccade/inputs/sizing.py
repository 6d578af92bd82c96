"""Image sizes in a request: `mm_processor_kwargs` for all images, OpenAI's `detail` for each. Both change the bounds of
an image's area within those of the checkpoint. A cap below the lower bound lowers that, too: it never enlarges an
image."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from saccade.errors import RequestError
from saccade.inputs.text.chat_messages import MediaRef
from saccade.models.media import ImageSettings

KWARGS = "mm_processor_kwargs"
DETAILS = ("auto", "low", "high")
LOW_DETAIL_PIXELS = 512 * 512  # OpenAI's `detail: low`
# Two names for each bound: Qwen's own, and that of transformers, where an "edge" is an area for these families.
_NAMES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}


def read_sizing(kwargs: Any, settings: ImageSettings | None, *, max_tokens: int | None = None) -> ImageSettings | None:
    """The checkpoint's settings with the bounds of a request. The encoder takes at most `max_tokens` at once. Refuses
    all other options, and every option for a model without bounds."""
    if kwargs is None or kwargs == {}:
        return settings
    if not isinstance(kwargs, Mapping):
        raise _wrong("must be an object", KWARGS)
    if settings is None:
        raise RequestError(f"{KWARGS}: this model takes no images", param=KWARGS, code="media_unsupported")
    if settings.fixed_size is not None:
        height, width = settings.fixed_size
        message = f"{KWARGS}: this model sees every image at {width}x{height} pixels; leave it out"
        raise RequestError(message, param=KWARGS, code="unsupported_parameter")
    asked = _read_bounds(kwargs)
    for value, param in asked.values():
        _check_bound(value, param, settings, max_tokens)
    low, high = asked.get("min_pixels"), asked.get("max_pixels")
    if low is not None and high is not None and low[0] > high[0]:
        raise _wrong(f"is {low[0]}, more than the upper bound, {high[0]}", low[1])
    wanted = settings if low is None else replace(settings, min_pixels=low[0])
    return wanted if high is None else capped(wanted, high[0])


def at_details(settings: ImageSettings | None, media: Sequence[MediaRef]) -> dict[str, ImageSettings]:
    """Settings of images whose `detail` is low, by param: it caps the area, which has no effect on a model with
    a fixed image size."""
    details = {ref.param: _read_detail(ref.part, ref.param) for ref in media if ref.kind == "image"}
    if settings is None:
        return {}
    return {param: capped(settings, LOW_DETAIL_PIXELS) for param, detail in details.items() if detail == "low"}


def capped(settings: ImageSettings, max_pixels: int) -> ImageSettings:
    if max_pixels >= settings.max_pixels:
        return settings
    return replace(settings, min_pixels=min(settings.min_pixels, max_pixels), max_pixels=max_pixels)


def _read_bounds(kwargs: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
    """The bounds, each with the param it came from."""
    size = kwargs.get("size") or {}
    if not isinstance(size, Mapping):
        raise _wrong("must be an object with shortest_edge and longest_edge", f"{KWARGS}.size")
    _check_names(kwargs, ("min_pixels", "max_pixels", "size"), KWARGS)
    _check_names(size, tuple(_NAMES.values()), f"{KWARGS}.size")
    found = {}
    for name, edge in _NAMES.items():
        given = [(kwargs.get(name), f"{KWARGS}.{name}"), (size.get(edge), f"{KWARGS}.size.{edge}")]
        values = [(_whole(value, param), param) for value, param in given if value is not None]
        if len({value for value, _ in values}) > 1:
            raise _wrong(f"is {values[1][0]}, but {values[0][1]} is {values[0][0]}; send one of them", values[1][1])
        if values:
            found[name] = values[0]
    return found


def _check_names(given: Mapping[str, Any], allowed: tuple[str, ...], param: str) -> None:
    for name, value in given.items():
        if name not in allowed and value is not None:
            at = f"{param}.{name}" if name.isidentifier() and len(name) < 64 else param
            message = f"{at} is not supported; allowed are {', '.join(allowed)}"
            raise RequestError(message, param=at, code="unsupported_parameter")


def _whole(value: Any, param: str) -> int:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or value < 1 or value != value // 1:
        raise _wrong("must be a positive whole number", param)
    return int(value)


def _check_bound(value: int, param: str, settings: ImageSettings, max_tokens: int | None) -> None:
    if value > settings.max_pixels:
        raise _wrong(f"is {value}; the checkpoint's limit is {settings.max_pixels}", param)
    most = None if max_tokens is None else max_tokens * (settings.patch * settings.merge) ** 2
    if most is not None and value > most:
        raise _wrong(f"is {value}; the limit is {most}, {max_tokens} tokens (--encoder-budget-tokens)", param)


def _read_detail(part: Mapping[str, Any], param: str) -> str | None:
    """`detail` is next to the URL, or in the part itself if the part gives its URL as a string."""
    value = part.get(param.rpartition(".")[2])
    detail = value.get("detail") if isinstance(value, Mapping) else None
    at = f"{param}.detail"
    if detail is None:
        detail, at = part.get("detail"), f"{param.rpartition('.')[0]}.detail"
    if detail is not None and detail not in DETAILS:
        raise _wrong(f"must be {', '.join(DETAILS[:-1])} or {DETAILS[-1]}", at)
    return detail


def _wrong(what: str, param: str) -> RequestError:
    return RequestError(f"{param} {what}", param=param, code="invalid_value")

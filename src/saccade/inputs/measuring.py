"""Measures a prompt before its images are decoded and its text is encoded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from saccade.errors import RequestError
from saccade.inputs.allowance import Allowance
from saccade.inputs.media.images import PIXEL_BYTES, SCRATCH_BYTES, ImageLimits, MeasuredImage, measure_image
from saccade.inputs.media.videos import measure_frames
from saccade.inputs.plans import MediaPlan, plan_image, plan_video
from saccade.inputs.text.chat_messages import MediaRef
from saccade.inputs.text.special_tokens import Segment
from saccade.inputs.text.tokenizer import Tokenizer
from saccade.models.media import ImageSettings, VideoSettings

MAX_VALUES = 200_000  # strings, numbers, lists and objects passed to a chat template
LONG_TEXT_CHARS = 64 * 1024
ENCODE_BYTES = 128  # per character, while a text is encoded


@dataclass(frozen=True, slots=True)
class Sized:
    """An image or video that is not decoded yet. Counts are zero where only a decoder can tell, as for a video file."""

    ref: MediaRef
    settings: ImageSettings | VideoSettings
    image: MeasuredImage | None = None
    plan: MediaPlan | None = None

    @property
    def num_tokens(self) -> int:
        return 0 if self.plan is None else self.plan.num_tokens

    @property
    def num_pixels(self) -> int:
        return 0 if self.image is None else self.image.num_pixels


def size_media(ref: MediaRef, settings: ImageSettings | VideoSettings, limits: ImageLimits) -> Sized:
    """Exact for images: the size rules are symmetric, so EXIF rotation does not change the number of tokens."""
    if isinstance(settings, ImageSettings):
        with ref.named_in_errors():
            image = measure_image(ref.source, limits)
        return Sized(ref, settings, image, plan_image(image.height, image.width, settings))
    with ref.named_in_errors():
        found = measure_frames(ref.source, limits)
    if found is None:
        return Sized(ref, settings)
    num_frames, height, width, fps = found
    return Sized(ref, settings, None, plan_video(num_frames, height, width, fps or ref.fps, settings))


def check_pixels(media: Sequence[Sized], limits: ImageLimits) -> None:
    """Refuses images that are too large together, even if each is allowed."""
    limit, total = limits.max_request_pixels, 0
    for item in media:
        total += item.num_pixels
        if limit is not None and total > limit:
            problem = f"the images of the request have at least {total} pixels"
            message = f"{problem}; the limit is {limit} (--max-request-pixels)"
            raise RequestError(message, param=item.ref.param, code="image_too_large", status=413)


def needed_bytes(media: Sequence[Sized]) -> int:
    """Memory for all images: the bytes of data URLs, all pixels, and scratch space to decode the largest image."""
    urls = [item.image.source for item in media if item.image is not None and isinstance(item.ref.source, str)]
    pixels = [item.num_pixels for item in media]
    encoded = sum(len(data) for data in urls if isinstance(data, bytes))
    return encoded + PIXEL_BYTES * sum(pixels) + SCRATCH_BYTES * max(pixels, default=0)


def check_messages(messages: Any, allowance: Allowance) -> None:
    """Refuses lists that are too long, before they are read. Every message takes at least one token."""
    if allowance.max_tokens is None or not isinstance(messages, list | tuple):
        return
    allowance.check_length(len(messages), f"there are {len(messages)} messages", "messages")
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    num_parts = sum(len(content) for content in contents if isinstance(content, list | tuple))
    if num_parts > MAX_VALUES:
        raise allowance.too_long(f"the messages have {num_parts} parts", "messages")


def check_text(value: Any, tokenizer: Tokenizer, allowance: Allowance, param: str) -> None:
    """Refuses text that is certain to be too long, at any depth of `value`."""
    if allowance.max_tokens is None:
        return
    num_chars, num_values, pending = 0, 0, [value]
    while pending and num_values <= MAX_VALUES:
        found = pending.pop()
        num_values += 1
        if isinstance(found, str):
            num_chars += len(found)
        elif isinstance(found, dict):
            pending += [*found.keys(), *found.values()]
        elif isinstance(found, list | tuple):
            pending += found
    if num_values > MAX_VALUES:
        raise allowance.too_long(f"the request has more than {MAX_VALUES} values for the chat template", param)
    _check_chars(num_chars, tokenizer, allowance, param)


def hold_text(segments: Sequence[Segment], tokenizer: Tokenizer, allowance: Allowance, param: str) -> None:
    """Reserves the memory to encode a text."""
    num_chars = sum(len(segment.text) for segment in segments)
    _check_chars(num_chars, tokenizer, allowance, param)
    if num_chars > LONG_TEXT_CHARS:
        allowance.hold(ENCODE_BYTES * num_chars)


def _check_chars(num_chars: int, tokenizer: Tokenizer, allowance: Allowance, param: str) -> None:
    if allowance.max_tokens is not None and not tokenizer.could_fit(num_chars, allowance.max_tokens):
        raise allowance.too_long(f"the text has {num_chars} characters", param)

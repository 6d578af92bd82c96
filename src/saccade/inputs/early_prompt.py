"""Makes a prompt's tokens, positions and digests while its images are being decoded: image headers have the sizes."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace

import numpy as np

from saccade.inputs.allowance import Allowance
from saccade.inputs.measuring import Sized
from saccade.inputs.media.images import digest_file, digest_pixels
from saccade.inputs.placeholders import Media, Prompt

NO_PIXELS = np.zeros((0, 0, 3), dtype=np.uint8)
Place = Callable[[Sequence[Media]], Prompt]


def early_prompt(
    place: Place, sized: Sequence[Sized], allowance: Allowance, decode: Callable[[], Sequence[Media]]
) -> Prompt:
    """The prompt of the media that `decode` returns, with their digests. Another thread (`Allowance.submit`) makes it
    meanwhile if all media are files. This thread does if that one has not begun by then, or if EXIF metadata rotates an
    image, because its header then has the wrong shape."""
    future: Future[Prompt] | None = None
    if allowance.submit is not None and sized and all(_is_file(item) for item in sized):
        future = allowance.submit(lambda: place([_with_digest(item, _without_pixels(item)) for item in sized]))
    try:
        media = decode()
    except BaseException:  # wait, because the memory of a failed request counts as free afterwards
        if future is not None and not future.cancel():
            wait([future])
        raise
    if future is not None and not future.cancel():  # it is running or done
        early = future.result()
        pairs = list(zip(media, early.media, strict=True))
        if all(decoded.plan == planned.plan for decoded, planned in pairs):
            return replace(early, media=tuple(replace(decoded, digest=planned.digest) for decoded, planned in pairs))
    return place([_with_digest(*pair) for pair in zip(sized, media, strict=True)])


def _is_file(item: Sized) -> bool:
    return item.image is not None and isinstance(item.image.source, bytes)


def _without_pixels(item: Sized) -> Media:
    assert item.plan is not None, "an image's size is known"
    return Media(item.ref.kind, NO_PIXELS, item.plan, b"")


def _with_digest(item: Sized, media: Media) -> Media:
    """Adds the digest. It covers the settings without their bounds, and the resulting size: the same file, or the same
    pixels, at the same size has the same features. It leaves out a video's times, which affect the prompt's text or
    positions but not the features."""
    name = item.settings.fingerprint + repr(media.plan.size_hw).encode()
    data = None if item.image is None else item.image.source
    digest = digest_file(data, name) if isinstance(data, bytes) else digest_pixels(media.pixels, name)
    return replace(media, digest=digest)

"""Makes a prompt's tokens, positions and digests while its images are being decoded: image headers have the sizes."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from types import TracebackType

import numpy as np

from saccade.inputs.allowance import Allowance
from saccade.inputs.measuring import Sized
from saccade.inputs.media.images import digest_file, digest_pixels
from saccade.inputs.placeholders import Media, Prompt

NO_PIXELS = np.zeros((0, 0, 3), dtype=np.uint8)
Place = Callable[[Sequence[Media]], Prompt]


class EarlyPrompt:
    """Decode inside `with`, then call `finish`. If there is no other thread (`Allowance.submit`), or if an image is not
    a file, `finish` does all the work. It also starts over if EXIF metadata rotates an image, because the header then
    has the wrong shape."""

    def __init__(self, place: Place, sized: Sequence[Sized], allowance: Allowance) -> None:
        self._place, self._sized = place, sized
        self._future: Future[Prompt] | None = None
        if allowance.submit is not None and sized and all(_is_file(item) for item in sized):
            self._future = allowance.submit(self._make_early)

    def __enter__(self) -> "EarlyPrompt":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for the work of a failed request, because its memory counts as free afterwards."""
        if error is not None and self._future is not None and not self._future.cancel():
            wait([self._future])

    def finish(self, media: Sequence[Media]) -> Prompt:
        """The prompt of the decoded media, with their digests."""
        if self._future is not None and not self._future.cancel():  # it is running or done
            early = self._future.result()
            pairs = list(zip(media, early.media, strict=True))
            if all(decoded.plan == planned.plan for decoded, planned in pairs):
                complete = (replace(decoded, digest=planned.digest) for decoded, planned in pairs)
                return replace(early, media=tuple(complete))
        return self._place([_with_digest(*pair) for pair in zip(self._sized, media, strict=True)])

    def _make_early(self) -> Prompt:
        return self._place([_with_digest(item, _without_pixels(item)) for item in self._sized])


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

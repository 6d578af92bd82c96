"""Makes a prompt's tokens, positions and digests while its images are decoded: their headers say how large they are."""

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
    """Decode within `with`, then call `finish`. Without a thread for it (`Allowance.beside`), or if an image is no
    file, `finish` does all the work. An image that its metadata turn has another shape than its header says: then what
    was made early is made again."""

    def __init__(self, place: Place, sized: Sequence[Sized], allowance: Allowance) -> None:
        self._place, self._sized = place, sized
        self._future: Future[Prompt] | None = None
        if allowance.beside is not None and sized and all(_is_file(item) for item in sized):
            self._future = allowance.beside(self._make_early)

    def __enter__(self) -> "EarlyPrompt":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What works for a request that failed is waited for, since its memory counts as free afterwards."""
        if error is not None and self._future is not None and not self._future.cancel():
            wait([self._future])

    def finish(self, media: Sequence[Media]) -> Prompt:
        """The prompt of the decoded media, whose digests are added."""
        if self._future is not None and not self._future.cancel():  # it has begun
            early = self._future.result()
            if all(made.plan == drawn.plan for made, drawn in zip(media, early.media, strict=True)):
                digests = [drawn.digest for drawn in early.media]
                found = (replace(made, digest=digest) for made, digest in zip(media, digests, strict=True))
                return replace(early, media=tuple(found))
        return self._place([_named(item, made) for item, made in zip(self._sized, media, strict=True)])

    def _make_early(self) -> Prompt:
        return self._place([_named(item, _outline(item)) for item in self._sized])


def _is_file(item: Sized) -> bool:
    return item.image is not None and isinstance(item.image.source, bytes)


def _outline(item: Sized) -> Media:
    assert item.plan is not None, "an image's size is known"
    return Media(item.ref.kind, NO_PIXELS, item.plan, b"")


def _named(item: Sized, media: Media) -> Media:
    """With its digest, which covers the settings without bounds, plus the resulting size: the same file, or the same
    pixels, at the same size have the same features. A video's times are in the prompt's text or positions, not in the
    features, so left out."""
    name = item.settings.fingerprint + repr(media.plan.size_hw).encode()
    data = None if item.image is None else item.image.source
    digest = digest_file(data, name) if isinstance(data, bytes) else digest_pixels(media.pixels, name)
    return replace(media, digest=digest)

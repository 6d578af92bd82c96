"""Puts images and videos into a prompt: from a template's markers to tokens, spans and positions.

Expansion has two steps. First each marker becomes the family's text around one placeholder token, so that newlines and
timestamps are tokenised with their neighbours exactly as in the family's own processor. After tokenisation, every
placeholder is repeated once per feature row. Placeholders are counted against the media before either step.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from saccade.errors import RequestError
from saccade.inputs.media_settings import PlaceholderSettings
from saccade.inputs.plans import MediaPlan
from saccade.inputs.positions import (
    FeatureRows,
    Ints,
    bidirectional_limits,
    mrope_positions,
    rope_delta,
    text_positions,
)
from saccade.inputs.text.chat_messages import MediaKind
from saccade.inputs.text.special_tokens import Segment


@dataclass(frozen=True, slots=True)
class Media:
    """One image or video of a prompt. `pixels` is (height, width, 3), or (frames, height, width, 3) for a video, with
    only the frames of the plan. `digest` identifies pixels and settings; `decode_s` is the decoding time."""

    kind: MediaKind
    pixels: npt.NDArray[np.uint8] = field(repr=False)
    plan: MediaPlan
    digest: bytes
    decode_s: float = field(default=0.0, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt for the engine. Arrays are read-only. Every placeholder token lies in exactly one span, and the spans of
    an image or video together cover its features once. `limits_T` is None if attention is fully causal (see paged
    attention). With `is_continued` the answer continues the prompt's text instead of starting a new one."""

    token_ids: Ints = field(repr=False)
    positions_3T: Ints = field(repr=False)
    rope_delta: int
    limits_T: Ints | None = field(repr=False, default=None)
    media: tuple[Media, ...] = ()
    spans: tuple[FeatureRows, ...] = ()
    is_continued: bool = False

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def pixel_bytes(self) -> int:
        return sum(media.pixels.nbytes for media in self.media)


def text_prompt(token_ids: Sequence[int] | Ints) -> Prompt:
    positions = text_positions(len(token_ids))
    return Prompt(_frozen(np.asarray(token_ids, dtype=np.int32)), _frozen(positions), rope_delta(positions))


def append_text(prompt: Prompt, token_ids: Sequence[int]) -> Prompt:
    """The prompt followed by more text tokens."""
    count, old = len(token_ids), prompt.positions_3T
    first = int(old[1:].max()) + 1 if old.size else 0
    positions = np.concatenate([old, np.tile(np.arange(first, first + count, dtype=np.int32), (3, 1))], axis=1)
    limits = prompt.limits_T
    return replace(
        prompt,
        token_ids=_frozen(np.concatenate([prompt.token_ids, np.asarray(token_ids, dtype=np.int32)])),
        positions_3T=_frozen(positions),
        rope_delta=rope_delta(positions),
        limits_T=None if limits is None else _frozen(np.concatenate([limits, np.zeros(count, dtype=np.int32)])),
    )


def marker_kinds(segments: Sequence[Segment], settings: PlaceholderSettings) -> list[MediaKind]:
    """The kinds of the markers in a text, in order."""
    return [kind for segment in segments for _, kind in _markers(segment, settings)]


def check_markers(segments: Sequence[Segment], kinds: Sequence[MediaKind], settings: PlaceholderSettings) -> None:
    """The text must have one marker per image or video, in the same order."""
    found = marker_kinds(segments, settings)
    if found != list(kinds):
        raise RequestError(
            f"the prompt has {_count(found)}, the request {_count(kinds)}; "
            "each must have its placeholder, in the same order",
            code="media_mismatch",
        )


def expand_text(
    segments: Sequence[Segment], plans: Sequence[MediaPlan], settings: PlaceholderSettings
) -> tuple[Segment, ...]:
    """Replaces markers with the family's text. `check_markers` must have passed."""
    remaining = iter(plans)
    return tuple(
        segment if segment.is_plain else Segment(_expand(segment, remaining, settings)) for segment in segments
    )


def place_media(token_ids: Sequence[int], media: Sequence[Media], settings: PlaceholderSettings) -> Prompt:
    """Repeats every placeholder once per feature row and builds spans and positions."""
    ids = np.asarray(token_ids, dtype=np.int32)
    blocks = [block for index, item in enumerate(media) for block in _blocks(index, item, settings)]
    places = _check_places(ids, blocks, media, settings)
    if not blocks:
        return text_prompt(ids)
    counts = np.ones(len(ids), dtype=np.int64)
    counts[places] = [block.length for block in blocks]
    offsets = (np.cumsum(counts) - counts)[places].tolist()
    blocks = [replace(block, offset=offset) for offset, block in zip(offsets, blocks, strict=True)]
    total = int(counts.sum())
    positions = mrope_positions(total, blocks) if settings.is_mrope else text_positions(total)
    limits = bidirectional_limits(total, blocks) if settings.is_bidirectional else None
    return Prompt(
        token_ids=_frozen(np.repeat(ids, counts)),
        positions_3T=_frozen(positions),
        rope_delta=rope_delta(positions),
        limits_T=None if limits is None else _frozen(limits),
        media=tuple(media),
        spans=tuple(blocks),
    )


def _blocks(media_idx: int, media: Media, settings: PlaceholderSettings) -> Iterator[FeatureRows]:
    """The feature rows of each placeholder token of an image or video. Their offsets are not known yet."""
    frames, height, width = media.plan.grid_thw
    grid = (frames, height // settings.merge, width // settings.merge)
    if media.kind == "video" and settings.has_timestamps:
        rows = grid[1] * grid[2]
        for frame in range(frames):
            yield FeatureRows(0, (1, grid[1], grid[2]), 1.0, media_idx, frame * rows)
        return
    interval = 1.0
    if media.kind == "video" and settings.tokens_per_second is not None:
        interval = settings.tokens_per_second * media.plan.second_per_grid
    yield FeatureRows(0, grid, interval, media_idx)


def _check_places(
    ids: Ints, blocks: Sequence[FeatureRows], media: Sequence[Media], settings: PlaceholderSettings
) -> npt.NDArray[np.intp]:
    """The indices of the placeholder tokens, which must match the blocks one by one."""
    expected = [
        settings.image_token_id if media[block.media_idx].kind == "image" else settings.video_token_id
        for block in blocks
    ]
    known = [token for token in (settings.image_token_id, settings.video_token_id) if token is not None]
    is_known = np.zeros(len(ids), dtype=bool)
    for token in known:
        is_known |= ids == token
    (places,) = np.nonzero(is_known)
    if ids[places].tolist() != expected:
        message = f"the prompt has {len(places)} placeholder tokens, its images and videos need {len(expected)}"
        raise RequestError(message, code="media_mismatch")
    return places


def _markers(segment: Segment, settings: PlaceholderSettings) -> Iterator[tuple[re.Match[str], MediaKind]]:
    if segment.is_plain:
        return
    markers = [marker for marker in (settings.image_marker, settings.video_marker) if marker]
    for match in re.finditer("|".join(map(re.escape, markers)), segment.text):
        yield match, "image" if match.group() == settings.image_marker else "video"


def _expand(segment: Segment, plans: Iterator[MediaPlan], settings: PlaceholderSettings) -> str:
    pieces, at = [], 0
    for match, kind in _markers(segment, settings):
        pieces += [segment.text[at : match.start()], _text_of(kind, next(plans), settings)]
        at = match.end()
    return "".join([*pieces, segment.text[at:]])


def _text_of(kind: MediaKind, plan: MediaPlan, settings: PlaceholderSettings) -> str:
    if kind == "image":
        return settings.image_text
    assert settings.video_text is not None, "a video was planned for a family that takes none"
    if not settings.has_timestamps:
        return settings.video_text
    return "".join(f"<{seconds:.1f} seconds>{settings.video_text}" for seconds in plan.timestamps)


def _count(kinds: Sequence[MediaKind]) -> str:
    return f"{list(kinds).count('image')} image(s) and {list(kinds).count('video')} video(s)"


def _frozen(array: Ints) -> Ints:
    array.flags.writeable = False
    return array

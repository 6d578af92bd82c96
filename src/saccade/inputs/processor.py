"""Makes engine prompts from messages or text, for one checkpoint folder."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from saccade.errors import ConfigError, RequestError
from saccade.inputs.allowance import ANYTHING, Allowance
from saccade.inputs.decoding import MediaDecoder
from saccade.inputs.early_prompt import early_prompt
from saccade.inputs.measuring import (
    Sized,
    check_messages,
    check_pixels,
    check_text,
    hold_text,
    needed_bytes,
    size_media,
)
from saccade.inputs.media.images import ImageLimits, check_counts
from saccade.inputs.media.media_pool import MediaPool
from saccade.inputs.media_settings import (
    PlaceholderSettings,
    read_image_settings,
    read_placeholder_settings,
    read_video_settings,
)
from saccade.inputs.placeholders import (
    Media,
    Prompt,
    append_text,
    check_markers,
    expand_text,
    marker_kinds,
    place_media,
    text_prompt,
)
from saccade.inputs.positions import Ints
from saccade.inputs.sizing import at_details
from saccade.inputs.text.chat_messages import ROLES, MediaKind, MediaRef
from saccade.inputs.text.chat_template import ChatTemplate, Rendered, read_template
from saccade.inputs.text.generation import config_eos_ids
from saccade.inputs.text.rank_prompts import (
    NO_THINKING,
    PUBLISHED_TEMPLATE,
    RANKING_ROLES,
    Content,
    has_ranking_roles,
    naming_sides,
    rank_messages,
)
from saccade.inputs.text.special_tokens import Segment, plain_segments, special_pattern
from saccade.inputs.text.tokenizer import Tokenizer
from saccade.models.media import ImageSettings, VideoSettings

MAX_TOKEN_ID = 2**31 - 1
_VARIABLES = ("bos_token", "eos_token", "pad_token", "unk_token")


class Processor:
    """Makes prompts for one checkpoint. It keeps no request state, so threads may share it. With a `pool`, media that
    may be expensive are decoded in processes that can be killed. The pool's creator closes it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: ChatTemplate | None = None,
        images: ImageSettings | None = None,
        videos: VideoSettings | None = None,
        placeholders: PlaceholderSettings | None = None,
        limits: ImageLimits | None = None,
        pool: MediaPool | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.images = images
        self.videos = videos
        self.placeholders = placeholders
        self.limits = limits or ImageLimits()
        self.pool = pool

    @classmethod
    def from_folder(cls, folder: Path, *, limits: ImageLimits | None = None, chat_template: str = "") -> "Processor":
        """`chat_template` is the path of a file that replaces the checkpoint's template."""
        placeholders = read_placeholder_settings(folder)
        protected = (*_placeholder_ids(placeholders), *config_eos_ids(folder))
        source = read_template(folder, chat_template)
        tokenizer = Tokenizer.from_folder(folder, protected=protected, template=source or "")
        named = {name: text for name in _VARIABLES if (text := tokenizer.named_token(name)) is not None}
        return cls(
            tokenizer,
            template=ChatTemplate(source, tokenizer.guarded, named_tokens=named) if source else None,
            images=read_image_settings(folder),
            videos=read_video_settings(folder),
            placeholders=placeholders,
            limits=limits,
        )

    def warm_up(self) -> None:
        """Makes and drops a text prompt and, if the model takes images, an image prompt, so that no request pays for
        what is built on first use. Ignores errors: other checks report them."""
        contents: list[Any] = ["Hello"]
        if self.images is not None:
            contents.append([{"type": "image"}, {"type": "text", "text": "Hello"}])
        for content in contents:
            with suppress(Exception):
                self.chat([{"role": "user", "content": content}], media=[_picture()] * isinstance(content, list))

    def chat(  # noqa: PLR0913
        self,
        messages: Any,
        *,
        media: Sequence[Any] = (),
        tools: Any = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        images: ImageSettings | None = None,
        allowance: Allowance = ANYTHING,
        joins_roles: bool = False,
    ) -> Prompt:
        """The prompt of a conversation. `media` fills the parts without a source, in order. `images` are the
        checkpoint's settings with other bounds (see `read_sizing`). For `joins_roles` see `ChatTemplate.render`."""
        if self.template is None:
            raise ConfigError("the checkpoint has no chat template; use a text prompt or add chat_template.jinja")
        check_messages(messages, allowance)
        rendered = self.template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
            check=lambda context: check_text(context, self.tokenizer, allowance, "messages"),
            joins_roles=joins_roles,
        )
        prompt = self._from_rendered(_fill_sources(rendered, media), images, allowance)
        return replace(prompt, is_continued=continue_final_message)

    def pair(
        self,
        query: Content,
        document: Content,
        *,
        instruction: str | None = None,
        images: ImageSettings | None = None,
        allowance: Allowance = ANYTHING,
    ) -> Prompt:
        """Asks whether a document matches a query, with the checkpoint's template or else the published one. Errors
        about parts name the `query` or the `document`."""
        template = self.template or self._ranking_template
        has_roles = has_ranking_roles(template.source)
        has_vision = self.images is not None and self.template is not None
        messages = rank_messages(query, document, instruction, has_roles=has_roles, has_vision=has_vision)
        check_messages(messages, allowance)
        with naming_sides(messages, query):
            rendered = template.render(
                messages,
                variables=NO_THINKING,
                check=lambda context: check_text(context, self.tokenizer, allowance, "messages"),
                roles=RANKING_ROLES if has_roles else ROLES,
            )
            return self._from_rendered(_fill_sources(rendered, ()), images, allowance)

    @cached_property
    def _ranking_template(self) -> ChatTemplate:
        return ChatTemplate(PUBLISHED_TEMPLATE, self.tokenizer.guarded)

    def _from_rendered(self, rendered: Rendered, images: ImageSettings | None, allowance: Allowance) -> Prompt:
        wanted = images or self.images
        sizes = at_details(wanted, rendered.media)
        return self._finish(rendered, has_bos=False, images=wanted, sizes=sizes, allowance=allowance, param="messages")

    def ended(self, prompt: Prompt, *, allowance: Allowance = ANYTHING, param: str = "prompt") -> Prompt:
        """The prompt followed by the tokens, if any, that the checkpoint's tokenizer appends to a text."""
        if not self.tokenizer.end_ids:
            return prompt
        allowance.check_tokens(len(prompt) + len(self.tokenizer.end_ids), "prompt has", param)
        return append_text(prompt, self.tokenizer.end_ids)

    def text(
        self,
        prompt: str,
        *,
        media: Sequence[tuple[str, Any]] = (),
        has_bos: bool = True,
        allowance: Allowance = ANYTHING,
    ) -> Prompt:
        """The prompt of raw text, which may contain special tokens. `media` are (kind, source) pairs. Without media, a
        placeholder token in the text stays plain text."""
        check_text(prompt, self.tokenizer, allowance, "prompt")
        refs = tuple(_check_kind(kind, source, f"media[{i}]") for i, (kind, source) in enumerate(media))
        segments: tuple[Segment, ...] = (Segment(prompt),)
        if not refs and self.placeholders is not None:
            segments = _plain_placeholders(prompt, self.tokenizer, self.placeholders)
        made = Rendered(segments, refs)
        return self._continued(
            self._finish(made, has_bos=has_bos, images=self.images, sizes={}, allowance=allowance, param="prompt")
        )

    def marker_kinds(self, prompt: str) -> list[MediaKind]:
        """The kinds of media that the placeholders in raw text stand for, in order."""
        return marker_kinds([Segment(prompt)], self.placeholders) if self.placeholders is not None else []

    def tokens(self, token_ids: Sequence[int] | npt.NDArray[Any], *, allowance: Allowance = ANYTHING) -> Prompt:
        if isinstance(token_ids, Sequence | np.ndarray):  # anything else is refused below
            allowance.check_tokens(len(token_ids), "prompt has", "prompt")
        ids = _token_ids(token_ids)
        taken = set(_placeholder_ids(self.placeholders)).intersection(ids.tolist())
        if taken:
            message = f"the prompt has placeholder tokens {sorted(taken)} but no media"
            raise RequestError(message, param="prompt", code="media_mismatch")
        return self._continued(text_prompt(ids))

    def _continued(self, prompt: Prompt) -> Prompt:
        """The answer continues the prompt's text, if it has any."""
        has_text = any(token not in self.tokenizer.special_ids for token in prompt.token_ids.tolist())
        return replace(prompt, is_continued=has_text)

    def _finish(
        self,
        rendered: Rendered,
        *,
        has_bos: bool,
        images: ImageSettings | None,
        sizes: Mapping[str, ImageSettings],
        allowance: Allowance,
        param: str,
    ) -> Prompt:
        """`images` are the settings of all images; `sizes` has other settings for some of them, by param."""
        for ref in rendered.media:
            self._check_supported(ref)
        check_counts(rendered.media, self.limits)
        settings = self.placeholders
        if settings is not None:
            check_markers(rendered.segments, [ref.kind for ref in rendered.media], settings)
        hold_text(rendered.segments, self.tokenizer, allowance, param)
        if settings is None:
            prompt = text_prompt(self.tokenizer.encode(rendered.segments, has_bos=has_bos))
        else:
            by_kind = {"image": images, "video": self.videos}  # neither is None if used: see `_check_supported`
            wanted = [(ref, sizes.get(ref.param) or by_kind[ref.kind]) for ref in rendered.media]
            sized = [size_media(ref, own, self.limits) for ref, own in wanted if own is not None]
            self._check_sized(sized, allowance, param)

            def place(media: Sequence[Media]) -> Prompt:
                segments = expand_text(rendered.segments, [item.plan for item in media], settings)
                return place_media(self.tokenizer.encode(segments, has_bos=has_bos), media, settings)

            decoder = MediaDecoder(self.images, self.limits, self.pool)
            prompt = early_prompt(place, sized, allowance, lambda: decoder.decode_all(sized, allowance, param))
        allowance.check_tokens(len(prompt), "prompt has", param)
        return prompt

    def _check_sized(self, sized: Sequence[Sized], allowance: Allowance, param: str) -> None:
        """Checks all media together before any is decoded."""
        check_pixels(sized, self.limits)
        num_tokens = sum(item.num_tokens for item in sized)
        allowance.check_tokens(num_tokens, "the images and videos alone have", param)
        allowance.hold(needed_bytes(sized))

    def _check_supported(self, ref: MediaRef) -> None:
        if self.images is None:
            raise RequestError("this model takes no images; send text", param=ref.param, code="media_unsupported")
        if self.videos is None and ref.kind == "video":
            raise RequestError("this model takes no videos; send images", param=ref.param, code="media_unsupported")


def _picture() -> bytes:
    file = BytesIO()
    Image.new("RGB", (256, 256), (200, 100, 50)).save(file, "JPEG")
    return file.getvalue()


def _fill_sources(rendered: Rendered, media: Sequence[Any]) -> Rendered:
    """Gives each part without a source the next of `media`. All must be used."""
    empty = [ref for ref in rendered.media if ref.source is None]
    if len(empty) != len(media):
        message = f"the messages have {len(empty)} image(s) or video(s) without a source, but {len(media)} were given"
        raise RequestError(message, param=empty[0].param if empty else "media", code="media_mismatch")
    given = iter(media)
    filled = tuple(ref if ref.source is not None else replace(ref, source=next(given)) for ref in rendered.media)
    return Rendered(rendered.segments, filled)


def _check_kind(kind: str, source: Any, param: str) -> MediaRef:
    if kind not in ("image", "video"):
        raise RequestError(f"{param}: the kind must be image or video", param=param, code="media_unsupported")
    return MediaRef("image" if kind == "image" else "video", source, param)


def _token_ids(given: Any) -> Ints:
    """Ids as the engine holds them. The conversion must be exact: 2**32 + 7 must not become 7, nor 1.5 become 1."""
    try:
        ids = np.asarray(given)
    except ValueError:  # lists of different lengths
        ids = np.asarray(None)
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise RequestError("token ids must be a list of integers", param="prompt")
    if len(ids) and not (ids.min() >= 0 and ids.max() <= MAX_TOKEN_ID):
        raise RequestError(f"prompt has token ids outside 0..{MAX_TOKEN_ID}", param="prompt")
    return ids.astype(np.int32)


def _placeholder_ids(settings: PlaceholderSettings | None) -> tuple[int, ...]:
    if settings is None:
        return ()
    return tuple(token for token in (settings.image_token_id, settings.video_token_id) if token is not None)


def _plain_placeholders(prompt: str, tokenizer: Tokenizer, settings: PlaceholderSettings) -> tuple[Segment, ...]:
    """Cuts raw text so that its placeholder tokens and markers are plain segments."""
    texts = {settings.image_marker, settings.video_marker}
    texts |= {tokenizer.token_text(token_id) for token_id in _placeholder_ids(settings)}
    pattern = special_pattern(text for text in texts if text)
    return plain_segments(prompt, pattern.finditer(prompt))

"""The special-token guard: user text never becomes a special token.

A chat template must see the user's real text, because templates look into it (`trim`, `in`, `startswith`, `split`).
Before rendering, the guard puts a mark inside every special token that a user's string contains, and at either end of
the string where neighbouring text could complete a token (`<|im_` and `end|>` must not join). After rendering it
removes the marks. A special token with a mark inside came from a user and becomes a plain segment, which the tokenizer
encodes as ordinary text.

Tags such as `<think>` are tokens that no file calls special. They are guarded in the text of users, tools and schemas,
but not in system and assistant messages, which come from the application: past assistant output contains tags.
Templates compare tags (`startswith('<tool_response>')`), so a tag's mark is outside it: after an opening tag, before a
closing one.

Marks are Unicode noncharacters that occur in no string of the request, so no user text is lost. Typing a noncharacter
gains nothing: a mark can only make tokens plain. Text without special tokens has no marks left after rendering and is
encoded exactly as in transformers.

Known gap: a template that deletes user text from inside a token could join its halves. Such a token may end a turn
early; it cannot claim image features, because placeholders are counted against the media.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from saccade.errors import RequestError

MAX_DEPTH = 64
NONCHARACTERS = "".join(map(chr, range(0xFDD0, 0xFDF0)))
APPLICATION_ROLES = frozenset({"assistant", "system", "developer"})
NUM_MARKS = 3
# Tags for reasoning and tools. Models are trained on them even if their template does not write them.
KNOWN_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_TAG = re.compile(r"(?=\S*[^\w\s])\S{3,}")  # only words that look like markup
_KEYS_TEMPLATES_COMPARE = frozenset({"role", "type"})


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a prompt. Unless `is_plain`, special tokens in it are recognised."""

    text: str
    is_plain: bool = False


class GuardedTokens:
    """A model's special tokens and tags, prepared for the guards of its requests."""

    def __init__(self, special_tokens: Sequence[str] = (), tags: Sequence[str] = ()) -> None:
        self.tokens = special_pattern(special_tokens)
        self.all_tokens = special_pattern([*special_tokens, *tags])
        self.tags = frozenset(tags)
        self.longest = max(map(len, (*special_tokens, *tags)), default=0)
        self.joined = "\0".join(special_tokens)
        # Sets, because a model has hundreds of tokens and a request can have thousands of strings.
        self.heads = {token[:size] for token in special_tokens for size in range(1, len(token) + 1)}
        self.ends = {token[-size:] for token in special_tokens for size in range(1, len(token) + 1)}
        self.tag_heads = {tag[:size] for tag in tags for size in range(1, len(tag))}
        self.tag_ends = {tag[-size:] for tag in tags for size in range(1, len(tag))}


class SpecialTokenGuard:
    """Marks special tokens and tags in a request's strings and finds them after rendering. One per request."""

    def __init__(self, guarded: GuardedTokens, marks: Sequence[str]) -> None:
        """`marks` are three characters: one inside a token, one after an opening tag, one before a closing tag."""
        self._guarded = guarded
        self._mark, self._behind, self._before = marks

    def protect_message(self, message: Any) -> Any:
        has_tags = not isinstance(message, dict) or message.get("role") not in APPLICATION_ROLES
        return self.protect(message, has_tags=has_tags, depth=2)

    def protect(self, value: Any, *, has_tags: bool = True, depth: int = 0) -> Any:
        """A copy of JSON-like data with marks in its strings, including the keys of mappings."""
        if depth > MAX_DEPTH:
            raise RequestError(f"the request is nested deeper than {MAX_DEPTH} levels", code="invalid_request")
        if isinstance(value, str):
            check_unicode(value)
            return self._protect_text(value, has_tags)
        if isinstance(value, list | tuple):
            return [self.protect(item, has_tags=has_tags, depth=depth + 1) for item in value]
        if isinstance(value, dict):
            return {
                self._protect_key(key, has_tags): self._protect_key(item, has_tags)
                if key in _KEYS_TEMPLATES_COMPARE and isinstance(item, str)
                else self.protect(item, has_tags=has_tags, depth=depth + 1)
                for key, item in value.items()
            }
        return value

    def split(self, rendered: str) -> tuple[Segment, ...]:
        """The rendered text without marks, cut so that every special token from a user is a plain segment."""
        pieces = re.split(f"([{self._mark}{self._behind}{self._before}])", rendered)
        text = "".join(pieces[::2])
        if len(pieces) == 1:
            return (Segment(text),)
        marks = list(accumulate(map(len, pieces[:-1:2])))  # positions of the marks, as offsets into the text
        mark_positions = set(zip(pieces[1::2], marks, strict=True))
        matches = self._guarded.all_tokens.finditer(text)
        return plain_segments(
            text, (m for m in matches if _is_marked(m, marks) or self._is_marked_tag(m, mark_positions))
        )

    def _is_marked_tag(self, match: re.Match[str], mark_positions: set[tuple[str, int]]) -> bool:
        is_closing = match.group().startswith("</")
        mark = (self._before, match.start()) if is_closing else (self._behind, match.end())
        return match.group() in self._guarded.tags and mark in mark_positions

    def _protect_text(self, text: str, has_tags: bool) -> str:
        """Puts marks inside tokens, and at the ends of the stripped text where a token could continue beyond them."""
        core = text.strip()
        if not core:
            return text
        before, _, after = text.partition(core)
        sizes = range(1, min(len(core), self._guarded.longest - 1) + 1)
        ends_token = core in self._guarded.joined or any(core[:size] in self._guarded.ends for size in sizes)
        begins_token = any(core[-size:] in self._guarded.heads for size in sizes)
        if has_tags:
            ends_token = ends_token or any(core in tag[1:] or core in tag[:-1] for tag in self._guarded.tags)
            ends_token = ends_token or any(core[:size] in self._guarded.tag_ends for size in sizes)
            begins_token = begins_token or any(core[-size:] in self._guarded.tag_heads for size in sizes)
        head, tail = self._mark * ends_token, self._mark * begins_token
        return before + head + self._protect_inside(core, has_tags) + tail + after

    def _protect_key(self, key: object, has_tags: bool) -> str:
        text = str(key)
        check_unicode(text)
        return self._protect_inside(text, has_tags)

    def _protect_inside(self, text: str, has_tags: bool) -> str:
        return (self._guarded.all_tokens if has_tags else self._guarded.tokens).sub(self._marked, text)

    def _marked(self, match: re.Match[str]) -> str:
        token = match.group()
        if token not in self._guarded.tags:
            return token[0] + self._mark + token[1:]
        return self._before + token if token.startswith("</") else token + self._behind


def template_tags(added_tokens: Iterable[str], template: str) -> tuple[str, ...]:
    """The added tokens that structure a conversation though no file calls them special."""
    return tuple(text for text in added_tokens if text in KNOWN_TAGS or (_TAG.fullmatch(text) and text in template))


def special_pattern(special_tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches any of the tokens, longest first, as the tokenizer does."""
    ordered = sorted(special_tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


def plain_segments(text: str, matches: Iterable[re.Match[str]]) -> tuple[Segment, ...]:
    """The text cut so that every match is a plain segment."""
    segments: list[Segment] = []
    at = 0
    for match in matches:
        segments += [Segment(text[at : match.start()]), Segment(match.group(), is_plain=True)]
        at = match.end()
    segments.append(Segment(text[at:]))
    return tuple(segment for segment in segments if segment.text)


def check_unicode(text: str) -> None:
    """Refuses lone surrogates, which JSON allows but UTF-8 does not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError("the text is not valid Unicode: it has half a surrogate pair", code="invalid_text") from None


def unused_marks(value: Any, marks: str = NONCHARACTERS) -> Iterator[str]:
    """The marks that occur nowhere in the value."""
    text = repr(value)  # repr escapes noncharacters, so search for the escapes
    return (mark for mark in marks if repr(mark)[1:-1] not in text)


def _is_marked(match: re.Match[str], marks: list[int]) -> bool:
    """Whether there was a mark strictly inside the match."""
    nearest = bisect_right(marks, match.start())
    return nearest < len(marks) and marks[nearest] < match.end()

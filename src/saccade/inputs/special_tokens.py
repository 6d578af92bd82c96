"""The special-token guard: what a user types never becomes a special token.

A chat template sees the user's real text, because templates look into it (`trim`, `in`, `startswith`, `split`). Before
rendering, a mark is put inside every special token spelled out in a user's string, and at a border of the string where
the template's neighbouring text could complete one (two parts `<|im_` and `end|>` must not join). After rendering the
marks are removed; a special token with a mark inside was spelled by a user and becomes a plain segment, which the
tokenizer encodes as ordinary text.

The mark is a Unicode noncharacter that occurs in no string of the request, so nothing a user writes is lost, and typing
a noncharacter gives no power: a mark can only make tokens plain. Text without such spellings carries no mark after
rendering and is encoded exactly as in transformers.

Known gap: a template that deletes part of a user's text from inside a spelled-out token could join its halves. Such a
token may end a turn early; it cannot claim image features, because placeholders are counted against the media.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from saccade.errors import RequestError

MAX_DEPTH = 64
_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
_KEYS_TEMPLATES_COMPARE = frozenset({"role", "type"})


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a prompt. Special tokens are recognised in it unless `is_plain`."""

    text: str
    is_plain: bool = False


class SpecialTokenGuard:
    """Marks special tokens in a request's strings and finds them again after rendering. One per request."""

    def __init__(self, special_tokens: Sequence[str], mark: str) -> None:
        self._mark = mark
        self._tokens = special_pattern(special_tokens)
        self._longest = max(map(len, special_tokens), default=0)
        self._all = "\0" + "\0".join(special_tokens) + "\0"

    def protect(self, value: Any, *, depth: int = 0) -> Any:
        """A copy of JSON-like data with marks in its strings, keys of mappings included."""
        if depth > MAX_DEPTH:
            raise RequestError(f"the request is nested deeper than {MAX_DEPTH} levels", code="invalid_request")
        if isinstance(value, str):
            check_unicode(value)
            return self._protect_text(value)
        if isinstance(value, list | tuple):
            return [self.protect(item, depth=depth + 1) for item in value]
        if isinstance(value, dict):
            return {
                self._protect_key(key): self._protect_key(item)
                if key in _KEYS_TEMPLATES_COMPARE and isinstance(item, str)
                else self.protect(item, depth=depth + 1)
                for key, item in value.items()
            }
        return value

    def split(self, rendered: str) -> tuple[Segment, ...]:
        """The rendered text without marks, cut so that every special token spelled by a user is a plain segment."""
        pieces = rendered.split(self._mark)
        text = "".join(pieces)
        if len(pieces) == 1:
            return (Segment(text),)
        marks = list(accumulate(map(len, pieces[:-1])))  # positions of the marks, as offsets into the text
        matches = self._tokens.finditer(text)
        return plain_segments(text, (match for match in matches if _is_marked(match, marks)))

    def _protect_text(self, text: str) -> str:
        """Marks inside and, where a token could continue beyond them, at the borders of the stripped text."""
        core = text.strip()
        if not core:
            return text
        before, _, after = text.partition(core)
        sizes = range(1, min(len(core), self._longest - 1) + 1)
        ends_token = core in self._all or any(core[:size] + "\0" in self._all for size in sizes)
        begins_token = any("\0" + core[-size:] in self._all for size in sizes)
        head, tail = self._mark * ends_token, self._mark * begins_token
        return before + head + self._protect_inside(core) + tail + after

    def _protect_key(self, key: object) -> str:
        text = str(key)
        check_unicode(text)
        return self._protect_inside(text)

    def _protect_inside(self, text: str) -> str:
        return self._tokens.sub(lambda match: match.group()[0] + self._mark + match.group()[1:], text)


def special_pattern(special_tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches any of the tokens, the longest first, as the tokenizer does."""
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
    """Refuses lone surrogates, which JSON allows and no encoder takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError("the text is not valid Unicode: it has half a surrogate pair", code="invalid_text") from None


def unused_mark(values: Iterable[Any]) -> str:
    text = repr(list(values))  # repr escapes noncharacters one by one, so each is found by its escape
    for mark in _NONCHARACTERS:
        if repr(mark)[1:-1] not in text:
            return mark
    raise RequestError("the request uses every Unicode noncharacter; send text", code="invalid_request")


def _is_marked(match: re.Match[str], marks: list[int]) -> bool:
    """Whether a mark stood strictly inside the match."""
    nearest = bisect_right(marks, match.start())
    return nearest < len(marks) and marks[nearest] < match.end()

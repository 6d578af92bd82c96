"""Token ids to text, one id at a time, never splitting a character: an incremental UTF-8 decoder holds back unfinished
ones. Work per token is constant. Bytes that are not UTF-8 become U+FFFD."""

import codecs
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from saccade.errors import ConfigError


@dataclass(frozen=True)
class TokenDecoder:
    """The bytes of every token. `strip_spaces` leading blanks belong to the encoding, not to the text."""

    token_text: Callable[[int], str | None]
    to_bytes: Callable[[str], bytes]
    special_ids: frozenset[int]
    strip_spaces: int = 0
    _cache: dict[int, bytes] = field(default_factory=dict, repr=False)

    @classmethod
    def from_definition(
        cls, definition: Any, *, token_text: Callable[[int], str | None], special_ids: frozenset[int]
    ) -> "TokenDecoder":
        """`definition` is the "decoder" object of tokenizer.json."""
        steps = {step["type"]: step for step in _steps(definition)}
        if "ByteLevel" in steps:
            return cls(token_text, _from_byte_level, special_ids)
        if "ByteFallback" in steps or "Metaspace" in steps:
            strip = int(steps["Strip"].get("start", 0)) if "Strip" in steps else 0
            if "Metaspace" in steps and steps["Metaspace"].get("prepend_scheme", "always") != "never":
                strip = 1
            return cls(token_text, _from_sentencepiece, special_ids, strip)
        raise ConfigError(
            f"tokenizer.json has a decoder of {sorted(steps)}; ByteLevel, ByteFallback and Metaspace are supported"
        )

    def bytes_of(self, token_id: int) -> bytes:
        """Empty for an id that the vocabulary does not have (padding rows of an embedding)."""
        found = self._cache.get(token_id)
        if found is None:
            text = self.token_text(token_id)
            found = self._cache[token_id] = b"" if text is None else self.to_bytes(text)
        return found


class Detokenizer:
    """The text of one growing sequence: `push` returns what each id adds, `flush` the rest at the end. With
    `is_continued` the sequence continues earlier text, and a leading blank belongs to the text."""

    def __init__(self, decoder: TokenDecoder, *, skip_special_tokens: bool = True, is_continued: bool = False) -> None:
        self._decoder = decoder
        self._skip = decoder.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip_spaces = 0 if is_continued else decoder.strip_spaces

    def push(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        return self._strip(self._utf8.decode(self._decoder.bytes_of(token_id)))

    def flush(self) -> str:
        return self._strip(self._utf8.decode(b"", final=True))

    def push_all(self, token_ids: Iterable[int]) -> str:
        return "".join(map(self.push, token_ids)) + self.flush()

    def _strip(self, text: str) -> str:
        if not self._strip_spaces or not text:
            return text
        kept = text.removeprefix(" " * self._strip_spaces)
        self._strip_spaces = 0
        return kept


def _steps(definition: Any) -> list[dict[str, Any]]:
    if not isinstance(definition, dict):
        return []
    if definition.get("type") == "Sequence":
        return [step for part in definition["decoders"] for step in _steps(part)]
    return [definition]


# GPT-2's printable alphabet for bytes: printable Latin-1 maps to itself, the others from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF_CHAR = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + i): byte for i, byte in enumerate(_OTHERS)}


def _from_byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    except KeyError:  # an added token, which is plain text
        return token.encode()


def _from_sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace("\u2581", " ").encode()

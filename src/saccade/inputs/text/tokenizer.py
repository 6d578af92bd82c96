"""A checkpoint's tokenizer, using only the `tokenizers` package. `encode` takes segments (see special_tokens.py). Text
without plain segments goes to the tokenizer in one piece, so its ids match transformers. Where a user typed a special
token or a tag, a twin tokenizer that knows neither encodes it and the ordinary text around it. The twin is built on
first use."""

import json
import re
import threading
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import tokenizers

from saccade.errors import ConfigError, PanicError, RequestError, contained
from saccade.inputs.checkpoint_files import read_optional_json, read_text
from saccade.inputs.text.detokenizer import Detokenizer, TokenDecoder
from saccade.inputs.text.special_tokens import GuardedTokens, Segment, check_unicode, template_tags

MAX_TOKENIZER_BYTES = 256 * 2**20
# Even short tokens can absorb spaces next to them, or merge a run of unknown characters into one.
MIN_TOKEN_CHARS = 32
MAX_ID_DIGITS = 10
_OLDER_FILES = ("tokenizer.model", "vocab.json")
_NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """Encodes and decodes; thread-safe. Only a template may produce the ids of `special_tokens`: tokens that the files
    mark special, that tokenizer_config.json names, or that are `protected` (image placeholders, end tokens). `tags` are
    other added tokens that structure a conversation; they decode to text."""

    def __init__(
        self,
        definition: str,
        config: dict[str, Any] | None = None,
        *,
        protected: Sequence[int] = (),
        template: str = "",
    ) -> None:
        """`definition` is the text of tokenizer.json, `config` the object in tokenizer_config.json, `template` the chat
        template, which decides what is a tag."""
        self.config = config or {}
        self._main = _build(definition, self.config)
        self._twin: tokenizers.Tokenizer | None = None
        self._twin_lock = threading.Lock()
        named = _named_specials(self.config)
        added = self._main.get_added_tokens_decoder()
        specials = {
            token_id: token.content
            for token_id, token in sorted(added.items())
            if token.special or token.content in named or token_id in protected
        }
        self.special_ids = frozenset(specials)
        self.special_tokens = tuple(specials.values())
        others = {token_id: token.content for token_id, token in added.items() if token_id not in specials}
        self.tags = template_tags(others.values(), template)
        self._guarded_ids = self.special_ids | {token_id for token_id, text in others.items() if text in self.tags}
        self.guarded = GuardedTokens(self.special_tokens, self.tags)
        self._shown: dict[int, tuple[str, list[int]]] = {}
        self._bos_ids = self._find_bos()
        self.end_ids = self._find_ends()
        self.decoder = TokenDecoder.from_definition(
            json.loads(self._main.decoder.__getstate__()) if self._main.decoder else None,
            token_text=self._main.id_to_token,
            special_ids=self.special_ids,
        )

    @classmethod
    def from_folder(cls, folder: Path, *, protected: Sequence[int] = (), template: str = "") -> "Tokenizer":
        older = next((name for name in _OLDER_FILES if (folder / name).is_file()), None)
        if older is not None and not (folder / "tokenizer.json").is_file():
            raise ConfigError(
                f"{folder} has {older} but no tokenizer.json; write one with transformers: "
                f"AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        definition = read_text(folder / "tokenizer.json", max_bytes=MAX_TOKENIZER_BYTES)
        config = read_optional_json(folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # as in transformers, whose older releases named the tokens there
            config |= read_optional_json(folder / "special_tokens_map.json")
        return cls(definition, config, protected=protected, template=template)

    @property
    def vocab_size(self) -> int:
        return self._main.get_vocab_size(with_added_tokens=True)

    def could_fit(self, num_chars: int, num_tokens: int) -> bool:
        """Whether `num_chars` characters could be as few as `num_tokens` tokens, given the longest token."""
        return num_chars <= num_tokens * MIN_TOKEN_CHARS or num_chars <= num_tokens * self._longest

    @cached_property
    def _longest(self) -> int:
        return max(MIN_TOKEN_CHARS, *map(len, self._main.get_vocab(with_added_tokens=True)))

    def warm_up(self) -> None:
        """Builds what only some texts need. With a large vocabulary this holds the GIL for most of a second, which
        would block a server's event loop."""
        self._without_specials()
        _ = self._longest

    def token_id(self, token: str) -> int | None:
        return self._main.token_to_id(token)

    def token_text(self, token_id: int) -> str | None:
        return self._main.id_to_token(token_id)

    def named_token(self, name: str) -> str | None:
        """The text of a token that tokenizer_config.json names, such as bos_token."""
        return _text_of(self.config.get(name))

    @property
    def eos_ids(self) -> frozenset[int]:
        """The token that tokenizer_config.json calls eos_token, if any."""
        found = self.token_id(self.named_token("eos_token") or "")
        return frozenset() if found is None else frozenset({found})

    def encode(self, text: str | Sequence[Segment], *, has_bos: bool = False) -> list[int]:
        """The ids of a prompt. `has_bos` puts the beginning-of-sequence token first unless the text starts with it."""
        segments = [Segment(text)] if isinstance(text, str) else text
        for segment in segments:
            check_unicode(segment.text)
        if any(segment.is_plain for segment in segments):
            ids = self._encode_mixed(segments)
        else:
            whole = "".join(segment.text for segment in segments)
            ids = _encode(self._main, whole)
        if has_bos and ids[: len(self._bos_ids)] != self._bos_ids:
            ids = self._bos_ids + ids
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """The ids of text in which no special token is recognised."""
        return self.encode([Segment(text, is_plain=True)])

    def detokenizer(self, *, skip_special_tokens: bool = True, is_continued: bool = False) -> Detokenizer:
        return Detokenizer(self.decoder, skip_special_tokens=skip_special_tokens, is_continued=is_continued)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.detokenizer(skip_special_tokens=skip_special_tokens).push_all(token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which may be partial characters."""
        return self.decoder.bytes_of(token_id)

    def shown(self, token_id: int) -> tuple[str, list[int]]:
        """One token as text and as numbers, for lists of log-probabilities. Callers must not change the list."""
        found = self._shown.get(token_id)
        if found is None:
            data = self.token_bytes(token_id)
            found = self._shown[token_id] = data.decode("utf-8", errors="replace"), list(data)
        return found

    def _encode_mixed(self, segments: Sequence[Segment]) -> list[int]:
        ids: list[int] = []
        for text, is_plain in _runs(segments, self.guarded.all_tokens):
            if not is_plain:
                ids += _encode(self._main, text)
                continue
            run = _encode(self._without_specials(), text)
            if not self._guarded_ids.isdisjoint(run):
                raise RequestError(
                    "the text has a special token that this model cannot encode as text", code="invalid_text"
                )
            ids += run
        return ids

    def _without_specials(self) -> tokenizers.Tokenizer:
        with self._twin_lock:
            if self._twin is None:
                twin = tokenizers.Tokenizer.from_str(self._main.to_str())
                guarded = (*self.special_tokens, *self.tags)
                marked = [tokenizers.AddedToken(text, special=True, normalized=False) for text in guarded]
                twin.add_special_tokens(marked)
                twin.encode_special_tokens = True
                self._twin = twin
            return self._twin

    def _find_bos(self) -> list[int]:
        """The ids that the post-processor puts before a text, unless tokenizer_config.json says otherwise."""
        wanted = self.config.get("add_bos_token")
        bos = self.token_id(self.named_token("bos_token") or "")
        if wanted is not None:
            return [bos] if wanted and bos is not None else []
        whole, start, num_bare = self._post_processed()
        if not num_bare:  # the vocabulary cannot encode the letter, so its position is unknown
            return whole[:1] if whole[:1] == [bos] else []
        return whole[:start]

    def _find_ends(self) -> list[int]:
        """The ids that it appends to a text. Models that embed a text's last token were trained with them."""
        wanted = self.config.get("add_eos_token")
        eos = self.token_id(self.named_token("eos_token") or "")
        if wanted:
            return [eos] if eos is not None else []
        whole, start, num_bare = self._post_processed()
        return whole[start + num_bare :] if num_bare else []

    def _post_processed(self) -> tuple[list[int], int, int]:
        """The post-processed ids of a letter, and the start and number of the letter's own ids."""
        whole: list[int] = self._main.encode("a", add_special_tokens=True).ids
        bare = self._main.encode("a", add_special_tokens=False).ids
        starts = (i for i in range(len(whole)) if bare and whole[i : i + len(bare)] == bare)
        return whole, next(starts, 0), len(bare)


def _encode(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    """`tokenizer.encode` would hold the GIL for a second per megabyte. A batch of one releases it, and skipping offsets
    saves time and memory."""
    try:
        with contained():
            ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    except PanicError:
        raise RequestError("the model's tokenizer cannot encode this text", code="invalid_text") from None
    return ids


def _build(definition: str, config: dict[str, Any]) -> tokenizers.Tokenizer:
    _check_prefix(definition)
    try:
        with contained():
            built = tokenizers.Tokenizer.from_str(definition)
    except Exception:  # the package raises bare exceptions whose text may quote the file
        raise ConfigError("tokenizer.json cannot be read by the tokenizers package; download it again") from None
    built.no_truncation()
    built.no_padding()
    known = built.get_added_tokens_decoder()
    for token_id, token in sorted(_added_tokens(config).items()):
        if token_id in known:
            token.special |= known[token_id].special  # as in transformers, a token never ceases to be special
            if _flags(token) == _flags(known[token_id]):
                continue
        built.add_special_tokens([token]) if token.special else built.add_tokens([token])
        if built.token_to_id(token.content) != token_id:
            raise ConfigError(
                f"tokenizer_config.json gives {token.content!r} the id {token_id}, tokenizer.json "
                f"{built.token_to_id(token.content)}; the two files come from different checkpoints"
            )
    return built


_ADDED_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
_HAS_PREFIX = re.compile(r'"continuing_subword_prefix"\s*:\s*"[^"]')


def _added_tokens(config: dict[str, Any]) -> dict[int, tokenizers.AddedToken]:
    given = config.get("added_tokens_decoder") or {}
    if not isinstance(given, dict):
        raise _broken("added_tokens_decoder", "an object with an entry for each id")
    found = {}
    for id_, raw in given.items():
        if not id_.isdecimal() or len(id_) > MAX_ID_DIGITS:
            raise _broken(f"added_tokens_decoder[{id_[:32]!r}]", "the id of a token")
        fields = {key: value for key, value in raw.items() if key in _ADDED_FIELDS} if isinstance(raw, dict) else {}
        content = fields.pop("content", None)
        is_text = isinstance(content, str) and _is_unicode(content)
        if not is_text or not all(isinstance(value, bool) for value in fields.values()):
            raise _broken(f"added_tokens_decoder[{id_}]", "an object with text (content) and true or false")
        found[int(id_)] = tokenizers.AddedToken(content, **fields)
    return found


def _broken(where: str, wanted: str) -> ConfigError:
    return ConfigError(f"tokenizer_config.json: {where} must be {wanted}; download it again")


def _check_prefix(definition: str) -> None:
    """A prefix that does not match the merges would make the package abort the process."""
    if not _HAS_PREFIX.search(definition):
        return
    try:
        model = json.loads(definition)["model"]
        prefix, merges = model["continuing_subword_prefix"], model.get("merges") or []
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
        fits = all(second.startswith(prefix) for _, second in pairs)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        fits = False
    if not fits:
        raise ConfigError("tokenizer.json: continuing_subword_prefix does not match its merges; download it again")


def _flags(token: tokenizers.AddedToken) -> tuple[Any, ...]:
    """All fields, for comparison: the package compares tokens by text only."""
    return tuple(getattr(token, name) for name in _ADDED_FIELDS)


def _runs(segments: Sequence[Segment], specials: re.Pattern[str]) -> list[tuple[str, bool]]:
    """Runs of (text, is_plain). A plain run is a plain segment with the text around it, up to the template's special
    tokens."""
    atoms = groupby(_atoms(segments, specials), key=itemgetter(1))
    return [("".join(text for text, _ in group), is_plain) for is_plain, group in atoms]


def _atoms(segments: Sequence[Segment], specials: re.Pattern[str]) -> Iterator[tuple[str, bool]]:
    """The template's special tokens and the ordinary text between them, one by one."""
    pieces: list[str] = []
    is_plain = False
    for segment in segments:
        if segment.is_plain:
            pieces.append(segment.text)
            is_plain = True
            continue
        at = 0
        for match in specials.finditer(segment.text):
            pieces.append(segment.text[at : match.start()])
            yield "".join(pieces), is_plain
            yield match.group(), False
            pieces, is_plain, at = [], False, match.end()
        pieces.append(segment.text[at:])
    yield "".join(pieces), is_plain


def _named_specials(config: dict[str, Any]) -> frozenset[str]:
    values = [config.get(name) for name in _NAMED_TOKENS]
    for name in ("additional_special_tokens", "extra_special_tokens"):
        given = config.get(name) or []
        if not isinstance(given, dict | list):
            raise _broken(name, "a list of tokens")
        values += given.values() if isinstance(given, dict) else given
    return frozenset(text for text in map(_text_of, values) if text)


def _is_unicode(text: str) -> bool:
    return text.encode(errors="replace").decode() == text


def _text_of(token: Any) -> str | None:
    """A token is a string or an object with its text as `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and _is_unicode(token) else None

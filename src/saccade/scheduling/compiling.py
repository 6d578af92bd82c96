"""Compiling a grammar for a vocabulary. The engine does so, and before it a process that can be killed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from saccade.wire.grammar import Grammar, broken, parser_limits, to_llguidance


class Vocabulary(Protocol):
    """What is needed of a tokenizer; `saccade.inputs.text.tokenizer.Tokenizer` fits."""

    special_ids: frozenset[int]

    def token_bytes(self, token_id: int) -> bytes: ...

    def encode_plain(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Words:
    """A vocabulary as llguidance reads it. Ids without bytes (embedding padding) are never allowed, and end tokens are
    never text: a checkpoint may not mark them as special, and one inside a string would end it there. The last token
    is an artificial end."""

    tokens: Sequence[bytes]
    special_token_ids: Sequence[int]
    ends: Sequence[int]
    encode: Callable[[str], list[int]]
    bos_token_id: None = None

    @classmethod
    def of(cls, vocabulary: Vocabulary, vocab_size: int, eos_token_ids: frozenset[int]) -> "Words":
        ends = sorted(token for token in eos_token_ids if token < vocab_size) or [vocab_size]
        specials = {id_ for id_ in vocabulary.special_ids if id_ < vocab_size}
        tokens = [*map(vocabulary.token_bytes, range(vocab_size)), b"<end of grammar>"]
        return cls(tokens, sorted({*specials, *ends, vocab_size}), ends, vocabulary.encode_plain)

    @property
    def eos_token_id(self) -> int:
        return len(self.tokens) - 1

    def __call__(self, text: Any) -> list[int]:
        return self.encode(text if isinstance(text, str) else text.decode(errors="replace"))


def build_tokenizer(words: Words) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(words), n_vocab=len(words.tokens), eos_token=list(words.ends))


def compile_grammar(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
    """Raises the RequestError that refuses the grammar."""
    text = to_llguidance(grammar)
    try:
        compiled = LLMatcher(tokenizer, text, log_level=0, limits=parser_limits())
    except BaseException:  # a panic of the library derives from it; nothing else runs in this thread
        raise broken("it cannot be compiled") from None
    if compiled.is_error():
        raise broken(compiled.get_error())
    return compiled

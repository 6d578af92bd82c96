"""Grammars at run time: compiled in their own thread, advanced token by token, turned into masks for the sampler. V
tokens of the vocabulary, N rows of a step, W 32-bit words that hold V + 1 bits: the last bit is an artificial end
token, so that models without end tokens have one too."""

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from saccade.errors import RequestError
from saccade.scheduling.orders import Mask
from saccade.wire.grammar import Grammar, broken, parser_limits, to_llguidance
from saccade.wire.update import BROKEN, NO_TOKEN

MAX_COMPILED = 256


class Vocabulary(Protocol):
    """What is needed of a tokenizer; `saccade.inputs.tokenizer.Tokenizer` fits."""

    special_ids: frozenset[int]

    def token_bytes(self, token_id: int) -> bytes: ...

    def encode_plain(self, text: str) -> list[int]: ...


class GrammarCompiler:
    """Compiles grammars for one vocabulary, one at a time, and caches the most recently used. Preparing the vocabulary
    takes a second, so the thread does it first and nothing waits. Pending grammars are never evicted, so that nothing
    is compiled twice for concurrent requests."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, eos_token_ids: frozenset[int] = frozenset()) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._tokenizer = self._thread.submit(_build_tokenizer, vocabulary, vocab_size, eos_token_ids)
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()

    def compile(self, grammar: Grammar) -> Future[LLMatcher]:
        """A matcher at the grammar's start, to be copied; or the RequestError that refuses the grammar."""
        found = self._compiled.get(grammar)
        if found is None:
            found = self._compiled[grammar] = self._thread.submit(_compile, grammar, self._tokenizer)
            while len(self._compiled) > MAX_COMPILED and next(iter(self._compiled.values())).done():
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return found

    def forget(self, grammar: Grammar, compiled: Future[LLMatcher]) -> None:
        """Cancel compilation if it has not begun. Another future of the same grammar has other waiters."""
        if self._compiled.get(grammar) is compiled and compiled.cancel():
            del self._compiled[grammar]


class Matcher:
    """Where one output is in its grammar. An `error` is final."""

    def __init__(self, compiled: LLMatcher, token_ids: Sequence[int] = ()) -> None:
        self.state = compiled.deep_copy()
        self.error: str | None = None
        for token in token_ids:
            self.take(token)

    @property
    def is_complete(self) -> bool:
        """Nothing may follow."""
        return self.error is None and bool(self.state.is_stopped())

    def take(self, token_id: int) -> None:
        if self.error is None and not self.state.consume_token(token_id):
            self.error = NO_TOKEN


@dataclass(frozen=True, slots=True)
class MaskedRow:
    """A row of logits and the matcher that takes its token. `forbidden` tokens are allowed only where the grammar
    leaves nothing else; tokens outside `allowed`, a mask, never."""

    row: int
    matcher: Matcher
    forbidden: tuple[int, ...] = ()
    allowed: NDArray[np.int32] | None = None


class Masks:
    """Turns matcher states into masks of a step's rows. Rows without a grammar have all bits set."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._num_words = num_words(vocab_size)
        self._threads: LLExecutor | None = None

    def compute(self, rows: Sequence[MaskedRow]) -> Mask:
        """What the grammars allow. A matcher that cannot continue leaves its row unmasked and gets an error."""
        first, end = min(r.row for r in rows), max(r.row for r in rows) + 1
        masks = np.full((end - first, self._num_words), -1, dtype=np.int32)
        try:
            self._compute(masks, rows, first)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic of the library; the culprit is unknown
            for item in rows:
                item.matcher.error = BROKEN
        for item in rows:
            self._finish(masks[item.row - first], item)
        return Mask(first, masks)

    def _compute(self, masks: NDArray[np.int32], rows: Sequence[MaskedRow], first: int) -> None:
        good = [item for item in rows if item.matcher.error is None]
        if len(good) == 1:
            place = masks[good[0].row - first]
            good[0].matcher.state.unsafe_compute_mask_ptr(place.ctypes.data, place.nbytes)
        elif good:
            self._threads = self._threads or LLExecutor()
            jobs = [(item.matcher.state, item.row - first) for item in good]
            self._threads.unsafe_compute_mask_ptr(jobs, masks.ctypes.data, masks.shape[1] * 4, masks.shape[0])

    def _finish(self, mask: NDArray[np.int32], item: MaskedRow) -> None:
        matcher = item.matcher
        if matcher.error is None and matcher.state.is_error():
            matcher.error = NO_TOKEN
        _clear(mask, (self._vocab_size,))
        if item.allowed is not None:
            mask &= item.allowed
        if matcher.error is None and not mask.any():
            matcher.error = NO_TOKEN
        if matcher.error is not None:
            mask.fill(-1)
            return
        if not item.forbidden:
            return
        kept = mask.copy()
        _clear(mask, [token for token in item.forbidden if token < self._vocab_size])
        if not mask.any():
            mask[:] = kept


def _clear(mask: NDArray[np.int32], token_ids: Sequence[int]) -> None:
    bits = mask.view(np.uint32)
    for token in token_ids:
        bits[token // 32] &= ~np.uint32(1 << token % 32)


def num_words(vocab_size: int) -> int:
    """Of a mask, which has a bit for "no more tokens" behind those of the vocabulary."""
    return vocab_size // 32 + 1


def allowed_bits(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    """Bit t % 32 of word t // 32 is set for each allowed token t."""
    bits = np.zeros(num_words(vocab_size) * 32, dtype=np.uint8)
    ids = np.asarray(token_ids)
    bits[ids[ids < vocab_size]] = 1
    return np.packbits(bits.reshape(-1, 32), axis=1, bitorder="little").view("<i4").reshape(-1)


def _build_tokenizer(vocabulary: Vocabulary, vocab_size: int, eos_token_ids: frozenset[int]) -> LLTokenizer:
    ends = sorted(token for token in eos_token_ids if token < vocab_size) or [vocab_size]
    return LLTokenizer(TokenizerWrapper(_Words(vocabulary, vocab_size, ends)), n_vocab=vocab_size + 1, eos_token=ends)


class _Words:
    """A vocabulary as llguidance reads it. Ids without bytes (embedding padding) are never allowed, and end tokens are
    never text: a checkpoint may not mark them as special, and one inside a string would end it there."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, ends: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self.tokens = [*map(vocabulary.token_bytes, range(vocab_size)), b"<end of grammar>"]
        specials = {id_ for id_ in vocabulary.special_ids if id_ < vocab_size}
        self.special_token_ids = sorted({*specials, *ends, vocab_size})
        self.eos_token_id = vocab_size
        self.bos_token_id = None

    def __call__(self, text: Any) -> list[int]:
        return self._vocabulary.encode_plain(text if isinstance(text, str) else text.decode(errors="replace"))


def _compile(grammar: Grammar, tokenizer: Future[LLTokenizer]) -> LLMatcher:
    text = to_llguidance(grammar)
    try:
        compiled = LLMatcher(tokenizer.result(), text, log_level=0, limits=parser_limits())
    except BaseException:  # a panic of the library derives from it; nothing else runs in this thread
        raise broken("it cannot be compiled") from None
    if compiled.is_error():
        raise broken(compiled.get_error())
    return compiled


def refusal(future: Future[LLMatcher]) -> RequestError | None:
    error = future.exception()
    return error if error is None or isinstance(error, RequestError) else broken("it cannot be compiled")

"""Grammars at run time: compiled on a dedicated thread, advanced token by token, turned into masks for the sampler.
A mask has a bit for every token of the vocabulary and a last one for an artificial end token, which models without end
tokens need."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Event

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from saccade.errors import CapacityError, RequestError
from saccade.jobs.fair_threads import FairThreads
from saccade.jobs.packets import resident_bytes
from saccade.jobs.pool_process import is_supported
from saccade.scheduling.compiling import Vocabulary, Words, build_tokenizer, compile_grammar
from saccade.scheduling.orders import Mask
from saccade.scheduling.trials import Trials, may_take_long, needs_trial
from saccade.wire.engine_metrics import JobStats
from saccade.wire.grammar import Grammar, broken
from saccade.wire.update import BROKEN, NO_TOKEN

MAX_COMPILED = 256
MAX_GROWN_BYTES = 512 * 2**20
MAX_TRIALS = 16  # at a time, of grammars that take milliseconds
MAX_LONG_TRIALS = 4  # at a time, of grammars that may take long; most of them wait for a process


@dataclass(frozen=True, slots=True)
class _Pending:
    """A requested grammar, and an event that is set when nobody waits for it any more."""

    compiled: Future[LLMatcher]
    is_abandoned: Event


class GrammarCompiler:
    """Compiles grammars for one vocabulary, one at a time, and caches the most recently used. The thread first prepares
    the vocabulary, which takes a second, so that start-up does not wait for it. Pending grammars are never evicted, so
    concurrent requests never compile a grammar twice. With `has_trials` each grammar is first tried in another process,
    several at a time (see `Trials`). Grammars that may take long queue separately, so that no other grammar waits for
    them. Compiled grammars grow while they are followed: once they have grown too much together, all are dropped."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        vocab_size: int,
        eos_token_ids: frozenset[int] = frozenset(),
        *,
        has_trials: bool = False,
    ) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        words = self._thread.submit(Words.of, vocabulary, vocab_size, eos_token_ids)
        self._tokenizer = self._thread.submit(lambda: build_tokenizer(words.result()))
        self._compiled: OrderedDict[Grammar, _Pending] = OrderedDict()
        self._trying = FairThreads(MAX_TRIALS, "trial")
        self._trying_long = FairThreads(MAX_LONG_TRIALS, "long trial")
        self._trials = self._trying.submit(lambda: Trials(words.result())) if has_trials and is_supported() else None
        self._mark = math.inf  # resident bytes that growth is measured from

    def compile(self, grammar: Grammar, caller: str = "") -> Future[LLMatcher]:
        """The future gives a matcher at the grammar's start, to be copied. It raises a RequestError if the grammar is
        refused, or a CapacityError if its trial process was lost. Callers take turns with their trials."""
        found = self._compiled.get(grammar)
        if found is None or _is_lost(found.compiled):
            self._drop_grown()
            is_abandoned = Event()
            if self._trials is None or not needs_trial(grammar):
                compiled = self._thread.submit(self._compile, grammar)
            else:
                threads = self._trying_long if may_take_long(grammar) else self._trying
                compiled = threads.submit(partial(self._try, grammar, is_abandoned, self._trials, caller), caller)
            found = self._compiled[grammar] = _Pending(compiled, is_abandoned)
            while len(self._compiled) > MAX_COMPILED and next(iter(self._compiled.values())).compiled.done():
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return found.compiled

    def forget(self, grammar: Grammar, compiled: Future[LLMatcher]) -> None:
        """Cancels a compilation that has not begun, and ends its trial. Does nothing if the grammar has another future
        by now, because others wait for that one."""
        found = self._compiled.get(grammar)
        if found is None or found.compiled is not compiled or (compiled.done() and not compiled.cancelled()):
            return
        found.is_abandoned.set()
        if compiled.cancel() or self._trials is not None:
            del self._compiled[grammar]

    @property
    def jobs(self) -> JobStats:
        if self._trials is None or not self._trials.done() or self._trials.exception() is not None:
            return JobStats()
        pool = self._trials.result().pool
        return JobStats(waiting=pool.num_waiting, killed=pool.num_killed)

    def close(self) -> None:
        """Ends the trial processes."""
        if self._trials is not None:
            self._trials.result().close()

    def _try(self, grammar: Grammar, is_abandoned: Event, trials: Future[Trials], caller: str) -> LLMatcher:
        def check_cancelled() -> None:
            if is_abandoned.is_set():
                raise CancelledError

        trials.result().check(grammar, check_cancelled, caller)
        check_cancelled()
        return self._thread.submit(self._compile, grammar).result()

    def _compile(self, grammar: Grammar) -> LLMatcher:
        return compile_grammar(grammar, self._tokenizer.result())

    def _drop_grown(self) -> None:
        if not is_supported():
            return
        now = resident_bytes()
        self._mark = min(self._mark, now)
        if now - self._mark > MAX_GROWN_BYTES:
            for grammar in [name for name, pending in self._compiled.items() if pending.compiled.done()]:
                del self._compiled[grammar]
            self._mark = now


def _is_lost(compiled: Future[LLMatcher]) -> bool:
    """Whether a trial was abandoned or its process was lost, which says nothing about the grammar."""
    if not compiled.done():
        return False
    return compiled.cancelled() or isinstance(compiled.exception(), CancelledError | CapacityError)


class Matcher:
    """Tracks where one output is in its grammar. An `error` is final."""

    def __init__(self, compiled: LLMatcher, token_ids: Sequence[int] = ()) -> None:
        self.state = compiled.deep_copy()
        self.error: str | None = None
        for token in token_ids:
            self.take(token)

    @property
    def is_complete(self) -> bool:
        """Whether no token may follow."""
        return self.error is None and bool(self.state.is_stopped())

    def take(self, token_id: int) -> None:
        if self.error is None and not self.state.consume_token(token_id):
            self.error = NO_TOKEN


@dataclass(frozen=True, slots=True)
class MaskedRow:
    """A row of logits and the matcher that takes its token. `forbidden` tokens are allowed only if the grammar allows
    nothing else. Tokens outside the mask `allowed` never are."""

    row: int
    matcher: Matcher
    forbidden: tuple[int, ...] = ()
    allowed: NDArray[np.int32] | None = None


class Masks:
    """Turns matcher states into masks for a step's rows. Rows without a grammar have all bits set."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._num_words = num_words(vocab_size)
        self._threads: LLExecutor | None = None

    def compute(self, rows: Sequence[MaskedRow]) -> Mask:
        """Computes what grammars allow. A matcher that cannot continue gets an error, and its row no mask."""
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
    """The number of words in a mask, which has a bit for the artificial end after those of the vocabulary."""
    return vocab_size // 32 + 1


def allowed_bits(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    """Bit t % 32 of word t // 32 is set for each allowed token t."""
    bits = np.zeros(num_words(vocab_size) * 32, dtype=np.uint8)
    ids = np.asarray(token_ids)
    bits[ids[ids < vocab_size]] = 1
    return np.packbits(bits.reshape(-1, 32), axis=1, bitorder="little").view("<i4").reshape(-1)


def refusal(future: Future[LLMatcher]) -> RequestError | CapacityError | None:
    error = future.exception()
    if error is None or isinstance(error, RequestError | CapacityError):
        return error
    return broken("it cannot be compiled")

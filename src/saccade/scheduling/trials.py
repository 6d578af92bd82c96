"""Tries grammars in a process that can be killed, before the engine compiles them.

A compiled grammar cannot leave its process, and llguidance's limits do not bound everything that compiling does: an
intersection of a few short expressions can take minutes and gigabytes, and then abort the process. Compiling is
deterministic, so a grammar that compiles within a trial's limits also does so in the engine. Afterwards, llguidance's
fuel bounds the mask for each token (see `parser_limits`).
"""

import os
import re
from collections.abc import Callable

import msgspec

from saccade.errors import CapacityError, RequestError
from saccade.jobs.pool import Pool, PoolClosedError
from saccade.jobs.pool_process import JobKilledError, JobLimits, ProcessLostError
from saccade.scheduling.compiling import Words
from saccade.scheduling.trial_process import VocabularyFile
from saccade.wire.grammar import PARAM, Grammar, broken

MODULE = "saccade.scheduling.trial_process"
NUM_PROCESSES = 2
LIMITS = JobLimits(cpu_s=2.0, memory_bytes=256 * 2**20, max_output_bytes=0)  # usual grammars take milliseconds
SAFE_KINDS = frozenset({"json_object", "choice"})  # they cannot intersect or repeat anything
_COMBINES = re.compile(r"[&~]")


def needs_trial(grammar: Grammar) -> bool:
    return grammar.kind not in SAFE_KINDS


def may_take_long(grammar: Grammar) -> bool:
    """Whether a grammar combines expressions. Fuel bounds all others: regular expressions, patterns of schemas."""
    return grammar.kind == "lark" and _COMBINES.search(grammar.text) is not None


class Trials:
    """Any thread may use it. Grammars that combine expressions leave one process free, so that ordinary ones never wait
    for them."""

    def __init__(self, words: Words) -> None:
        self._file = os.memfd_create("saccade-vocabulary", os.MFD_CLOEXEC)
        vocabulary: VocabularyFile = list(words.tokens), list(words.special_token_ids), list(words.ends)
        view = memoryview(msgspec.msgpack.encode(vocabulary))
        while view:
            view = view[os.write(self._file, view) :]
        self.pool = Pool(MODULE, NUM_PROCESSES, str(self._file), fds=(self._file,))

    def check(self, grammar: Grammar, check_cancelled: Callable[[], None], caller: str = "") -> None:
        """Raises a RequestError if the grammar is refused, and whatever `check_cancelled` raises."""
        data = msgspec.msgpack.encode(grammar)
        cost_s = 1.0 if may_take_long(grammar) else 0.1
        try:
            self.pool.run(b"", (data,), LIMITS, cost_s=cost_s, caller=caller, check_cancelled=check_cancelled)
        except RequestError as error:
            error.param = PARAM
            raise
        except JobKilledError:
            limit = f"{LIMITS.cpu_s:g} seconds of CPU time or {LIMITS.memory_bytes // 2**20} MiB"
            raise broken(f"it takes more than {limit} to compile; use a simpler one") from None
        except (ProcessLostError, PoolClosedError):
            raise CapacityError("the process that tried the grammar has ended; try again") from None

    def close(self) -> None:
        self.pool.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

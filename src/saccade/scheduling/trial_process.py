"""A process that compiles grammars to find out whether that ends: `python -m saccade.scheduling.trial_process SOCKET
FILE`, where FILE is an inherited file descriptor with a vocabulary. See `Trials`."""

import os
import sys

import msgspec
import numpy as np

from saccade.jobs.job_process import Desk, main
from saccade.scheduling.compiling import Words, build_tokenizer, compile_grammar
from saccade.wire.grammar import Grammar, broken


class VocabularyFile(msgspec.Struct, frozen=True):
    """A vocabulary without its merges. Only text forced by a grammar would need them, and no trial gets that far."""

    tokens: list[bytes]
    special_token_ids: list[int]
    ends: list[int]


class Trial(msgspec.Struct, frozen=True):
    kind: str
    text: str
    has_whitespace: bool


def read_vocabulary(file: int) -> VocabularyFile:
    return msgspec.msgpack.decode(os.pread(file, os.fstat(file).st_size, 0), type=VocabularyFile)


def run(file: int) -> int:
    read = read_vocabulary(file)
    tokenizer = build_tokenizer(Words(read.tokens, read.special_token_ids, read.ends, lambda text: []))
    num_words = len(read.tokens) // 32 + 1

    def work(words: bytes, data: bytes, desk: Desk) -> bytes:
        """Compiles a grammar and computes its first mask."""
        trial = msgspec.msgpack.decode(data, type=Trial)
        grammar = Grammar(trial.kind, trial.text, trial.has_whitespace)  # type: ignore[arg-type]
        compiled = compile_grammar(grammar, tokenizer)
        mask = np.zeros(num_words, np.int32)
        try:
            compiled.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        except BaseException:  # a panic of the library
            raise broken("it cannot be followed") from None
        return b""

    return main(work)


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[2])))

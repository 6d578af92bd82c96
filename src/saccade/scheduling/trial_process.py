"""A process that compiles grammars to find out whether that ends: `python -m saccade.scheduling.trial_process SOCKET
FILE`, where FILE is an inherited file descriptor with a vocabulary. See `Trials`."""

import os
import sys

import msgspec
import numpy as np

from saccade.jobs.job_process import Desk, main
from saccade.scheduling.compiling import Words, build_tokenizer, compile_grammar
from saccade.wire.grammar import Grammar, broken

# Tokens, special ids and ends, without merges: only text forced by a grammar would need them; no trial gets that far.
VocabularyFile = tuple[list[bytes], list[int], list[int]]


def run(file: int) -> int:
    tokens, special_ids, ends = msgspec.msgpack.decode(os.pread(file, os.fstat(file).st_size, 0), type=VocabularyFile)
    tokenizer = build_tokenizer(Words(tokens, special_ids, ends, lambda text: []))
    num_words = len(tokens) // 32 + 1

    def work(words: bytes, data: bytes, desk: Desk) -> bytes:
        """Compiles a grammar and computes its first mask."""
        compiled = compile_grammar(msgspec.msgpack.decode(data, type=Grammar), tokenizer)
        mask = np.zeros(num_words, np.int32)
        try:
            compiled.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        except BaseException:  # a panic of the library
            raise broken("it cannot be followed") from None
        return b""

    return main(work)


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[2])))

"""Runs a fuzzer for some minutes, or repeats one of its cases. Shared by every `python -m tests....fuzz_...`."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import Protocol


class IndexedCase(Protocol):
    @property
    def index(self) -> int: ...


RunCases = Callable[[int, Iterator[int]], Iterator[tuple[IndexedCase, Exception | None]]]  # for a seed and indices


def fuzz_reader(about: str | None) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=about)
    found.add_argument("--minutes", type=float, default=1.0)
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--only", type=int, help="run this case again")
    return found


def fuzz(given: argparse.Namespace, run_cases: RunCases, *, flags: str = "") -> int:
    """Prints the flags that repeat each failed case; the exit status is 1 if there was one."""
    num_found = num_cases = 0
    end = time.monotonic() + 60 * given.minutes
    indices = iter(range(2**62)) if given.only is None else iter([given.only])
    for case, error in run_cases(given.seed, indices):
        num_cases += 1
        if error is not None:
            num_found += 1
            sys.stdout.write(f"{flags}--seed {given.seed} --only {case.index}: {error}\n")
        if time.monotonic() > end:
            break
    sys.stdout.write(f"{num_cases} cases, {num_found} found\n")
    return 1 if num_found else 0

"""Compiles the bytecode of the packages that a worker imports, in several processes: `python -m saccade.bytecode I N`.

Otherwise the first start on a machine compiles each module as it is imported, which takes half of a worker's import
time there. Python compiles whatever is not ready in time, as usual.
"""

import py_compile
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

from saccade.config import BYTECODE_FOLDER
from saccade.machine import usable_cores
from saccade.processes import end_with_input, end_with_parent, start_python

# In import order. Packages that are not installed are skipped.
PACKAGES = ("saccade", "numpy", "msgspec", "torch", "triton", "cutlass", "tvm_ffi", "quack", "flash_attn")
MIN_CORES = 8
MAX_PROCESSES = 8
MODULE = "saccade.bytecode"


def compile_if_new(environment: Mapping[str, str]) -> None:
    """Start the processes if this environment names a bytecode folder and the folder is empty."""
    folder, cores = environment.get(BYTECODE_FOLDER), usable_cores()
    if folder is None or cores < MIN_CORES or not Path(folder).is_dir() or any(Path(folder).iterdir()):
        return
    count = min(MAX_PROCESSES, cores // 2)
    with suppress(OSError):
        started = [start_python(MODULE, str(i), str(count), environment=environment) for i in range(count)]
        Thread(target=_reap, args=(started,), daemon=True).start()


def _reap(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    for process in processes:
        process.communicate()


def sources(packages: Sequence[str]) -> Iterator[Path]:
    """Source files of the installed packages, in a fixed order. Imports nothing."""
    for name in packages:
        found = find_spec(name)
        for folder in (found.submodule_search_locations or ()) if found is not None else ():
            yield from sorted(Path(folder).rglob("*.py"))


def compile_share(index: int, count: int, packages: Sequence[str] = PACKAGES) -> None:
    for i, source in enumerate(sources(packages)):
        if i % count == index:
            with suppress(OSError, ValueError):
                py_compile.compile(str(source), quiet=2)


def main(index: int, count: int) -> None:
    end_with_parent()
    end_with_input()
    compile_share(index, count)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

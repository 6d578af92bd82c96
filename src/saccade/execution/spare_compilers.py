"""Compile processes that are started before it is known which kernels to compile, because their imports take seconds.
For the same reason this module imports almost nothing."""

import fcntl
import os
import subprocess
from contextlib import suppress
from pathlib import Path

from saccade.config import kernel_folder, worker_environment
from saccade.machine import available_bytes, usable_cores
from saccade.processes import start_python

COMPILER = "saccade.dry_run.compile_process"
GPUS = Path("/dev/nvidiactl")
MAX_PROCESSES = 12  # there are about 60 kernels, and the slowest takes a tenth of the total time
SPARED_CORES = 2
HOST_BYTES = 3 * 2**30  # host memory that one process may need
STARTED = "started"  # a folder with an empty file for each engine configuration whose kernels are on disk


class SpareCompilers:
    """On a machine with a GPU on which no engine has ever started, as many processes as fit; otherwise none. Whoever
    takes processes must end them; `close` ends the rest."""

    def __init__(self, module: str = COMPILER) -> None:
        self._module = module
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lock: int | None = None
        folder = kernel_folder()
        if folder is None or not GPUS.exists() or any((folder / STARTED).glob("*")):
            return
        with suppress(OSError):
            self._lock = os.open(folder / "spare.lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # several workers may start at once
            self._processes = start_compilers(room_for_compilers(), module)

    def take(self, count: int) -> list["subprocess.Popen[bytes]"]:
        """Returns `count` processes, spare ones first, and ends the other spare ones."""
        taken, self._processes = self._processes[:count], self._processes[count:]
        self.close()
        return taken + start_compilers(count - len(taken), self._module)

    def close(self) -> None:
        end_compilers(self._processes)
        self._processes = []
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def start_compilers(count: int, module: str) -> list["subprocess.Popen[bytes]"]:
    """Starts up to `count` processes, as many as the system allows."""
    started: list[subprocess.Popen[bytes]] = []
    environment = worker_environment()
    with suppress(OSError):
        for _ in range(count):
            started.append(start_python(module, environment=environment))
    return started


def end_compilers(processes: list["subprocess.Popen[bytes]"]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.communicate()


def room_for_compilers() -> int:
    """How many compile processes the cores and the memory allow."""
    return max(0, min(MAX_PROCESSES, usable_cores() - SPARED_CORES, available_bytes() // HOST_BYTES))

"""Processes that will compile kernels, started before it is known which: their imports take seconds. That is why this
module imports almost nothing."""

import fcntl
import os
import subprocess
from contextlib import suppress
from pathlib import Path

from saccade.config import kernel_folder, worker_environment
from saccade.processes import start_python

COMPILER = "saccade.dry_run.compile_process"
GPUS = Path("/dev/nvidiactl")
MOST_PROCESSES = 12  # there are some 60 kernels, and the slowest takes a tenth of all
SPARED_CORES = 2
HOST_BYTES = 3 * 2**30  # that one process may need
STARTED = "started"  # a folder of empty files, one for each way of starting an engine whose kernels are on disk


class SpareCompilers:
    """On a machine with a GPU on which nothing was ever compiled, as many processes as it has room for; else none.
    Whoever takes them ends them; `close` ends the rest."""

    def __init__(self, module: str = COMPILER) -> None:
        self._module = module
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lock: int | None = None
        folder = kernel_folder()
        if folder is None or not GPUS.exists() or any(_files(folder / STARTED)):
            return
        with suppress(OSError):
            self._lock = os.open(folder / "spare.lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # several workers may start at once
            self._processes = start_compilers(room_for_compilers(), module)

    def take(self, count: int) -> list["subprocess.Popen[bytes]"]:
        """So many processes, spare ones first."""
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
    """As many of them as can be started."""
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
    """How many processes the machine's cores and memory allow."""
    return max(0, min(MOST_PROCESSES, (os.cpu_count() or 1) - SPARED_CORES, available_bytes() // HOST_BYTES))


def available_bytes() -> int:
    """Of the host's memory."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    found = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return 1024 * int(next(found, "0"))


def _files(folder: Path) -> list[Path]:
    return list(folder.glob("*")) if folder.is_dir() else []

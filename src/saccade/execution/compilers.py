"""Kernels compiled by several processes while the worker imports packages and loads weights.

Compilers of kernels run on one core each, so a first start waits for them one after the other. Here every process
compiles a share of what the model's passes need to the caches on disk (`saccade.dry_run.compile_process`), and the
worker then finds it there. A process that fails or hangs costs time only: what is missing is compiled on the way.
"""

import fcntl
import logging
import os
import subprocess
from dataclasses import replace
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import monotonic, sleep

import msgspec
import torch

from saccade import kernels
from saccade.config import kernel_folder, worker_environment
from saccade.processes import start_python
from saccade.wire.messages import OnStage, Stage, StartEngine

COMPILER = "saccade.dry_run.compile_process"
PACKAGES = ("saccade-vlm", "torch", "triton", "quack-kernels", "flash-attn-4", "nvidia-cutlass-dsl")
MOST_PROCESSES = 12  # there are some 60 kernels, and the slowest takes a tenth of all
SPARED_CORES = 2
HOST_BYTES, DEVICE_BYTES = 3 * 2**30, 3 * 2**29  # that one process may need
DEVICE_SHARE = 1 / 8  # of a GPU's memory, for all of them; they end before memory is measured
WAIT_S, POLL_S = 240.0, 0.05

log = logging.getLogger(__name__)


class CompileJob(msgspec.Struct, frozen=True):
    """One of `count` shares of the kernels that an engine needs."""

    start: StartEngine
    index: int
    count: int


class CompileProcesses:
    """Processes that compile. `wait` returns when all have ended; `close` ends those that run. Where another worker
    compiles the same kernels already, there are none, and `wait` waits for that one."""

    def __init__(self, start: StartEngine, count: int, stamp: Path, module: str) -> None:
        self._stamp = stamp
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lock: int | None = None
        try:
            stamp.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(stamp.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
            if self._is_first():
                self._start(start, count, module)
        except OSError as error:  # no memory, or one that ended at once
            log.warning("kernels are compiled one after the other: %s", error)
            self.close()

    def _start(self, start: StartEngine, count: int, module: str) -> None:
        environment = worker_environment()
        for index in range(count):
            process = start_python(module, environment=environment)
            self._processes.append(process)
            assert process.stdin is not None, "it is a pipe"
            process.stdin.write(msgspec.json.encode(CompileJob(start, index, count)) + b"\n")
            process.stdin.flush()

    def wait(self, report: OnStage, wait_s: float = WAIT_S) -> None:
        """Report how many have ended until all have."""
        total, deadline, shown = len(self._processes), monotonic() + wait_s, -1
        while (left := self._num_left()) and monotonic() < deadline:
            if left != shown:
                report(Stage("compiling kernels", max(0, total - left), total))
            shown = left
            sleep(POLL_S)
        num_failed = sum(each.poll() != 0 for each in self._processes)
        if num_failed:
            log.warning("%d of %d processes that compile kernels failed: the start takes longer", num_failed, total)
        self.close()

    def note_started(self) -> None:
        """Call when the engine is ready: then all its kernels are on disk, whoever compiled them."""
        try:
            self._stamp.touch()
        except OSError:
            log.debug("the next start will compile kernels again", exc_info=True)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            assert process.stdin is not None, "it is a pipe"
            process.stdin.close()
            process.wait()
        self._processes = []
        if self._lock is not None:
            os.close(self._lock)  # unlocks it
            self._lock = None

    def _num_left(self) -> int:
        if self._processes or self._lock is None:
            return sum(each.poll() is None for each in self._processes)
        return int(not self._is_first())

    def _is_first(self) -> bool:
        """Whether no other worker holds the lock; if so, this one does from now on."""
        assert self._lock is not None, "it is open"
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def start_compiling(start: StartEngine, device: torch.device) -> CompileProcesses | None:
    """None where nothing is compiled, where all of it is on disk, or where several processes would not help."""
    folder = kernel_folder()
    if device.type != "cuda" or start.settings.tensor_parallel_size > 1 or folder is None:
        return None
    stamp = folder / "started" / _digest(start, device)
    device_bytes = torch.cuda.get_device_properties(device).total_memory
    count = num_processes(os.cpu_count() or 1, _available_bytes(), device_bytes)
    if stamp.exists() or count < 2:
        return None
    torch.zeros((), device=device)  # a GPU may be for one process only, and that is this one
    return CompileProcesses(start, count, stamp, COMPILER)


def num_processes(num_cores: int, host_bytes: int, device_bytes: int) -> int:
    by_memory = min(host_bytes // HOST_BYTES, int(device_bytes * DEVICE_SHARE) // DEVICE_BYTES)
    return max(0, min(MOST_PROCESSES, num_cores - SPARED_CORES, by_memory))


def _digest(start: StartEngine, device: torch.device) -> str:
    """Of all that decides which kernels are compiled: the model's dimensions, how it is run, on what, by what."""
    properties = torch.cuda.get_device_properties(device)
    sources = sorted(Path(kernels.__path__[0]).glob("*.py"))
    config = Path(start.folder) / "config.json"
    parts = (
        config.read_bytes() if config.is_file() else start.folder,
        msgspec.json.encode(replace(start.settings, device="")),
        msgspec.json.encode(start.limits),
        (properties.name, properties.major, properties.minor, properties.multi_processor_count),
        [_version(name) for name in PACKAGES],
        [(each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in sources],
    )
    return blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _available_bytes() -> int:
    """Of the host's memory."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    found = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return 1024 * int(next(found, "0"))

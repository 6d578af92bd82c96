"""Compiles kernels in several processes while the worker imports packages and loads weights.

A kernel compiler uses one core, so without help a first start would compile one kernel after the other. Each process
compiles a share of the model's kernels into the caches on disk (`saccade.dry_run.compile_process`), where the worker
finds them. A process that fails or hangs only costs time: the worker compiles whatever is missing.
"""

import fcntl
import logging
import os
import subprocess
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import monotonic, sleep

import msgspec
import torch

from saccade import kernels
from saccade.config import kernel_folder
from saccade.execution.spare_compilers import STARTED, SpareCompilers, end_compilers, room_for_compilers
from saccade.models.model_config import Config
from saccade.wire.messages import OnStage, Stage, StartEngine

PACKAGES = ("saccade-vlm", "torch", "triton", "quack-kernels", "flash-attn-4", "nvidia-cutlass-dsl")
CONFIG = "config.json"
DEVICE_BYTES = 3 * 2**29  # GPU memory that one process may need
DEVICE_SHARE = 1 / 8  # of a GPU's memory, for all processes; they end before memory is measured
WAIT_S, POLL_S = 240.0, 0.05

log = logging.getLogger(__name__)


class CompileJob(msgspec.Struct, frozen=True):
    """Share number `index` of `count` of the kernels that an engine needs."""

    start: StartEngine
    index: int
    count: int


class CompileProcesses:
    """The compile processes of one start. If another worker is already compiling, none are started, and `wait` waits
    for that worker instead."""

    def __init__(self, start: StartEngine, count: int, stamp: Path, spares: SpareCompilers) -> None:
        self._stamp = stamp
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lock: int | None = None
        with suppress(OSError):
            stamp.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(stamp.parent.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
            if self._is_first():
                self._processes = spares.take(count)
        for index, process in enumerate(self._processes):
            with suppress(OSError):  # the process has already exited
                assert process.stdin is not None, "it is a pipe"
                process.stdin.write(msgspec.json.encode(CompileJob(start, index, count)) + b"\n")
                process.stdin.flush()

    def wait(self, report: OnStage, wait_s: float = WAIT_S) -> None:
        """Waits until all processes have ended, and reports progress; kills those that take longer than `wait_s`."""
        total, deadline, shown = len(self._processes), monotonic() + wait_s, -1
        while (left := self._num_left()) and monotonic() < deadline:
            if left != shown:
                report(Stage("compiling kernels", max(0, total - left), total))
            shown = left
            sleep(POLL_S)
        num_failed = sum(each.poll() != 0 for each in self._processes)
        if num_failed:
            log.warning("%d of %d compile processes failed, so this start takes longer", num_failed, total)
        self.close()

    def note_started(self) -> None:
        """Call when the engine is ready: all its kernels are on disk then."""
        try:
            self._stamp.touch()
        except OSError:
            log.debug("the next start will compile kernels again", exc_info=True)

    def close(self) -> None:
        end_compilers(self._processes)
        self._processes = []
        if self._lock is not None:
            os.close(self._lock)  # releases the lock
            self._lock = None

    def _num_left(self) -> int:
        if self._processes or self._lock is None:
            return sum(each.poll() is None for each in self._processes)
        return int(not self._is_first())

    def _is_first(self) -> bool:
        """Takes the lock. Returns False if another worker holds it."""
        assert self._lock is not None, "it is open"
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def start_compiling(start: StartEngine, device: torch.device, spares: SpareCompilers) -> CompileProcesses | None:
    """Returns None if nothing is to be compiled, if all kernels are on disk, or if several processes would not help.
    Uses or ends the spare processes."""
    try:
        folder, has_config = kernel_folder(), (Path(start.folder) / CONFIG).is_file()  # a GGUF file has none
        if device.type != "cuda" or start.settings.tensor_parallel_size > 1 or folder is None or not has_config:
            return None
        stamp = folder / STARTED / _digest(start, device)
        count = min(room_for_compilers(), room_on(torch.cuda.get_device_properties(device).total_memory))
        if stamp.exists() or count < 2:
            return None
        torch.zeros((), device=device)  # if only one process may use the GPU, it must be this one
        return CompileProcesses(start, count, stamp, spares)
    finally:
        spares.close()


def room_on(device_bytes: int) -> int:
    """How many compile processes may use a GPU of this size."""
    return int(device_bytes * DEVICE_SHARE) // DEVICE_BYTES


def _digest(start: StartEngine, device: torch.device) -> str:
    """Digest of everything that decides which kernels are compiled: model, settings, device, packages and sources."""
    properties = torch.cuda.get_device_properties(device)
    sources = sorted(Path(kernels.__path__[0]).glob("*.py"))
    parts = (
        Config.read(Path(start.folder) / CONFIG).values,
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

"""One process of a pool, as the pool sees it."""

import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from saccade.config import job_environment
from saccade.errors import RequestError, SaccadeError
from saccade.jobs import packets
from saccade.jobs.mapping import map_file
from saccade.processes import describe_exit, start_python

POLL_S = 0.05
START_CPU_S = 20.0  # for the imports of a new process
WALL_FACTOR, WALL_S = 10.0, 30.0  # generous, as the machine may be busy: the CPU limit should be hit first
CRASHES = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP})
STOP_S = 5.0

Reason = Literal["cpu", "memory", "time", "crash"]


def is_supported() -> bool:
    """Whether this system has anonymous memory files that can be sealed, and CPU clocks of other processes."""
    return sys.platform == "linux"


class JobKilledError(SaccadeError):
    """The job exceeded a limit, or crashed its process."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class ProcessLostError(SaccadeError):
    """The process ended or broke the protocol. This may not be the job's fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLimits:
    cpu_s: float
    memory_bytes: int  # on top of what the pool lets it hold
    max_output_bytes: int

    @property
    def wall_s(self) -> float:
        return WALL_FACTOR * self.cpu_s + WALL_S


@dataclass(frozen=True, slots=True)
class JobOutput:
    """The job's reply, and its data in memory that can no longer change."""

    words: bytes
    data: npt.NDArray[np.uint8]


class PoolProcess:
    """Used by one thread at a time; any thread may `stop` it."""

    def __init__(self, module: str, *words: str, fds: tuple[int, ...] = ()) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                inherited = (theirs.fileno(), *fds)
                self._process: subprocess.Popen[bytes] = start_python(
                    module, str(theirs.fileno()), *words, environment=job_environment(), fds=inherited
                )
            except BaseException:
                ours.close()
                raise
        self._link = ours
        self.pid = self._process.pid
        self._clock = ~self.pid << 3 | 2  # Linux's id for the CPU clock of a process
        self._poll = select.poll()
        self._poll.register(ours, select.POLLIN)
        self.was_killed = False  # before its job was done
        self._is_usable = True

    @property
    def is_alive(self) -> bool:
        return self._is_usable and self._process.poll() is None

    def run(
        self,
        words: bytes,
        data: tuple[bytes, ...],
        limits: JobLimits,
        hold: Callable[[int], None],
        check_cancelled: Callable[[], None],
    ) -> JobOutput:
        """Runs a job. The process is killed unless it completes the job properly."""
        self._is_usable, proper, self.was_killed = False, False, True
        output = os.memfd_create("saccade-output", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            self._send(packets.Job(words, sum(map(len, data)), limits.cpu_s, limits.memory_bytes), data, output)
            reply = self._wait(limits, hold, check_cancelled)
            proper, self.was_killed = not reply.is_last, False
            if isinstance(reply, packets.JobRefused):
                raise RequestError(_printable(reply.message), code=reply.code, status=_status(reply.status))
            return JobOutput(reply.words, _sealed(output, reply.num_bytes, limits.max_output_bytes))
        except ProcessLostError:
            proper, self.was_killed = False, True
            raise
        finally:
            os.close(output)
            self._is_usable = proper
            if not proper:
                self.kill()

    def stop(self) -> None:
        """Kills the process. The thread that waits for its job notices."""
        self._is_usable = False
        with suppress(OSError):
            self._process.kill()

    def kill(self) -> None:
        """Kills the process and releases its resources. May be called again."""
        self.stop()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._link.close()

    def _send(self, job: packets.Job, data: tuple[bytes, ...], output: int) -> None:
        given = os.memfd_create("saccade-input", os.MFD_CLOEXEC)
        try:
            for part in data:
                view = memoryview(part)
                while view:
                    view = view[os.write(given, view) :]
            socket.send_fds(self._link, [packets.encode(job)], [given, output])
        except (BrokenPipeError, ConnectionError):
            raise self._ended() from None
        finally:
            os.close(given)

    def _wait(
        self, limits: JobLimits, hold: Callable[[int], None], check_cancelled: Callable[[], None]
    ) -> packets.JobDone | packets.JobRefused:
        cpu_end, has_begun = self._cpu_s() + START_CPU_S, False
        wall_end = time.monotonic() + limits.wall_s
        refusal: Exception | None = None
        while True:
            if not self._poll.poll(POLL_S * 1000):
                check_cancelled()
                self._check(limits, cpu_end, wall_end)
                continue
            match self._receive():
                case packets.Began() if not has_begun:
                    cpu_end, has_begun = self._cpu_s() + limits.cpu_s, True
                case packets.Began():
                    raise ProcessLostError("it began its job twice")
                case packets.Hold(num_bytes):
                    self._check(limits, cpu_end, wall_end)  # the process could ask forever
                    refusal = refusal or self._hold(num_bytes, hold)
                case packets.JobFailed(is_memory=True):
                    raise JobKilledError("memory", "it needs more memory than allowed")
                case packets.JobFailed(text=text):
                    raise ProcessLostError(f"it failed ({_printable(text)[:80]})")
                case packets.JobDone() | packets.JobRefused() as reply:
                    if refusal is not None:
                        raise refusal
                    return reply

    def _check(self, limits: JobLimits, cpu_end: float, wall_end: float) -> None:
        if self._cpu_s() > cpu_end:
            raise JobKilledError("cpu", f"it needs more than {limits.cpu_s:g} seconds of CPU time")
        if time.monotonic() > wall_end:
            raise JobKilledError("time", f"it did not end within {limits.wall_s:g} seconds")

    def _receive(self) -> packets.FromProcess:
        try:
            data = self._link.recv(packets.MAX_PACKET_BYTES)
        except OSError:
            data = b""
        if not data:
            raise self._ended()
        try:
            return packets.read_reply(data)
        except packets.BadPacketError as error:
            raise ProcessLostError(str(error)) from None

    def _hold(self, num_bytes: int, hold: Callable[[int], None]) -> Exception | None:
        """Tells the process whether it may have the memory. Returns the reason for a refusal."""
        if num_bytes < 0:
            raise ProcessLostError(f"it asked for {num_bytes} bytes")
        refusal = None
        try:
            hold(num_bytes)
        except Exception as error:
            refusal = error
        try:
            self._link.send(packets.encode(packets.Held(refusal is None)))
        except OSError:
            raise self._ended() from None
        return refusal

    def _ended(self) -> SaccadeError:
        """Why the process is gone. Only signals that the job itself causes are its fault: anyone may send SIGKILL."""
        try:
            code = self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            return ProcessLostError("it closed its socket")
        if code == -signal.SIGXCPU:
            return JobKilledError("cpu", "it needs too much CPU time")
        if -code in CRASHES:
            return JobKilledError("crash", f"its process {describe_exit(code)}")
        return ProcessLostError(f"its process {describe_exit(code)}")

    def _cpu_s(self) -> float:
        try:
            return time.clock_gettime(self._clock)
        except OSError:  # the process has ended; the next read of its socket will show it
            return 0.0


def _sealed(output: int, num_bytes: int, max_bytes: int) -> npt.NDArray[np.uint8]:
    """Seals the file and returns it as an array. Reading a file that shrinks later would kill this process, and pixels
    that change would no longer match their digest. Sealing fails if the process kept a writable mapping."""
    try:
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(output, fcntl.F_ADD_SEALS, seals)
    except OSError:
        raise ProcessLostError("it keeps its result open for writing") from None
    size = os.fstat(output).st_size
    if size != num_bytes or size > max_bytes:
        raise ProcessLostError(f"its result has {size} bytes; it said {num_bytes}, and {max_bytes} are allowed")
    return map_file(output, size)


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text[: packets.MAX_MESSAGE_CHARS])


def _status(status: int) -> int:
    return status if 400 <= status <= 499 else 400

"""The process side of a pool: runs one job at a time, each under its own limits."""

import mmap
import os
import resource
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from math import prod
from time import process_time

import msgspec
import numpy as np
import numpy.typing as npt

from saccade.errors import RequestError
from saccade.jobs import packets
from saccade.processes import end_with_parent, print_error

MAX_GROWN_BYTES = 48 * 2**20  # resident memory that a process may keep between jobs
CPU_GRACE_S = 2  # the pool's own limit comes first; this one is for a pool that hangs

Work = Callable[[bytes, bytes, "Desk"], bytes]


class HoldRefusedError(Exception):
    """The pool refused the memory. The reason stays with the pool."""


class Desk:
    """Where a job asks for memory and puts its result."""

    def __init__(self, link: socket.socket, output: int, memory_bytes: int) -> None:
        self._link, self._output = link, output
        self._limit = packets.used_address_space() + memory_bytes
        self.num_bytes = 0
        self._apply()

    def hold(self, num_bytes: int) -> None:
        """Asks the pool for more memory and waits for its answer. This is the only way to get more."""
        self._link.send(packets.encode(packets.Hold(num_bytes)))
        held = packets.read_order(self._link.recv(packets.MAX_PACKET_BYTES))
        assert isinstance(held, packets.Held), f"it sent {held}"
        if not held.is_allowed:
            raise HoldRefusedError
        self._limit += num_bytes
        self._apply()

    def array(self, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """The output file as an array to fill, so that the result is returned without a copy. The last call counts."""
        self.num_bytes = prod(shape)
        os.ftruncate(self._output, 0)
        os.ftruncate(self._output, self.num_bytes)
        if not self.num_bytes:
            return np.empty(shape, np.uint8)
        try:
            memory = mmap.mmap(self._output, self.num_bytes)
        except OSError:
            raise MemoryError from None
        return np.frombuffer(memory, np.uint8).reshape(shape)

    def _apply(self) -> None:
        _set_limit(resource.RLIMIT_AS, self._limit)


def serve(link: socket.socket, work: Work) -> None:
    """Runs jobs until the pool closes its end, a job fails, or the process has grown too much."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")  # libraries would describe clients' files in the server's log
    first = packets.resident_bytes()
    while True:
        data, fds, _, _ = socket.recv_fds(link, packets.MAX_PACKET_BYTES, 2)
        if not data:
            return
        job = packets.read_order(data)
        assert isinstance(job, packets.Job) and len(fds) == 2, f"it sent {job} and {len(fds)} files"
        reply = _run(link, job, fds[0], fds[1], work)
        is_last = isinstance(reply, packets.JobFailed) or packets.resident_bytes() - first > MAX_GROWN_BYTES
        if is_last and not isinstance(reply, packets.JobFailed):
            reply = msgspec.structs.replace(reply, is_last=True)
        link.send(packets.encode(reply))
        if is_last:
            return


def _run(
    link: socket.socket, job: packets.Job, given: int, output: int, work: Work
) -> packets.JobDone | packets.JobRefused | packets.JobFailed:
    """Runs one job. No mapping of the output outlives this call, so that the pool can seal the file."""
    _set_limit(resource.RLIMIT_CPU, int(process_time() + job.cpu_s) + CPU_GRACE_S)
    try:
        link.send(packets.encode(packets.Began()))
        data = os.pread(given, job.num_bytes, 0)
        desk = Desk(link, output, job.memory_bytes)
        words = work(job.words, data, desk)
        return packets.JobDone(words, desk.num_bytes)
    except RequestError as error:
        return packets.JobRefused(str(error)[: packets.MAX_MESSAGE_CHARS], error.code, error.status)
    except HoldRefusedError:
        return packets.JobRefused("not enough memory", None, 503)  # the pool has the reason
    except MemoryError:
        return packets.JobFailed(is_memory=True)
    except Exception as error:
        print_error(error)
        return packets.JobFailed(is_memory=False, text=type(error).__name__)
    finally:
        os.close(given)
        os.close(output)
        _set_limit(resource.RLIMIT_AS, None)


def _set_limit(kind: int, value: int | None) -> None:
    """None restores the limit that this process was started with."""
    _, hard = resource.getrlimit(kind)
    is_open = hard == resource.RLIM_INFINITY
    soft = hard if value is None else value if is_open else min(value, hard)
    resource.setrlimit(kind, (soft, hard))


def main(work: Work) -> int:
    """The entry point of a job module, whose first argument is its socket's descriptor."""
    with socket.socket(fileno=int(sys.argv[1])) as link:
        serve(link, work)
    return 0

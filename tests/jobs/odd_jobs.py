"""A job module for tests: its jobs misbehave in various ways."""

import os
import sys
from collections.abc import Callable
from time import monotonic_ns, sleep
from typing import Any

import numpy as np

from saccade.errors import RequestError
from saccade.jobs import packets
from saccade.jobs.job_process import Desk, main

KEPT: list[Any] = []


def echo(data: bytes, desk: Desk) -> bytes:
    desk.array((len(data),))[:] = np.frombuffer(data, np.uint8)
    return b"echo"


def pid(data: bytes, desk: Desk) -> bytes:
    return str(os.getpid()).encode()


def now(data: bytes, desk: Desk) -> bytes:
    """The time of a clock that all processes of this machine share."""
    return str(monotonic_ns()).encode()


def nap(data: bytes, desk: Desk) -> bytes:
    sleep(float(data))
    return b""


def spin(data: bytes, desk: Desk) -> bytes:
    while True:
        pass


def grow(data: bytes, desk: Desk) -> bytes:
    return bytes(int(data))


def hold(data: bytes, desk: Desk) -> bytes:
    """Uses the memory that it was granted, which is more than it started with."""
    desk.hold(int(data))
    np.ones(int(data), np.uint8)
    return b""


def keep(data: bytes, desk: Desk) -> bytes:
    KEPT.append(np.ones(int(data), np.uint8))
    return b""


def abort(data: bytes, desk: Desk) -> bytes:
    os.kill(os.getpid(), int(data))
    sleep(60)
    return b""


def refuse(data: bytes, desk: Desk) -> bytes:
    raise RequestError("no \x1b[31mgood", code="bad", status=int(data or b"413"))


def fail(data: bytes, desk: Desk) -> bytes:
    raise ValueError("broken")


def lie(data: bytes, desk: Desk) -> bytes:
    """Says that the result is longer than it is."""
    desk.array((10,))
    desk.num_bytes = 1000
    return b""


def hoard(data: bytes, desk: Desk) -> bytes:
    """Keeps a mapping of its result, to change it later."""
    KEPT.append(desk.array((10,)))
    return b""


def flood(data: bytes, desk: Desk) -> bytes:
    desk.array((int(data),))
    return b""


def babble(data: bytes, desk: Desk) -> bytes:
    desk._link.send(b"\xc1 nonsense")
    sleep(60)
    return b""


def beg(data: bytes, desk: Desk) -> bytes:
    while True:
        desk.hold(0)


def restart(data: bytes, desk: Desk) -> bytes:
    """Tries to restart the count of its CPU time."""
    desk._link.send(packets.encode(packets.Began()))
    sleep(60)
    return b""


def libraries(data: bytes, desk: Desk) -> bytes:
    heavy = sorted({"torch", "transformers"} & sys.modules.keys())
    return ",".join([*heavy, *(name for name in os.environ if "SECRET" in name)]).encode()


JOBS: dict[bytes, Callable[[bytes, Desk], bytes]] = {
    function.__name__.encode(): function
    for function in (
        *(echo, pid, now, nap, spin, grow, hold, keep, abort, refuse, fail, lie, hoard, flood, babble, beg, restart),
        libraries,
    )
}


def work(words: bytes, data: bytes, desk: Desk) -> bytes:
    return JOBS[words](data, desk)


if __name__ == "__main__":
    sys.exit(main(work))

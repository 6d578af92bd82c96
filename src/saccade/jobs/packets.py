"""What a pool and its processes say to each other: packets of msgpack over a Unix socket, never pickle. The data
itself is in anonymous memory files, whose descriptors are sent with the job."""

import os
from typing import Any, TypeAlias

import msgspec

from saccade.errors import SaccadeError

MAX_PACKET_BYTES = 64 * 2**10
MAX_MESSAGE_CHARS = 500


class Job(msgspec.Struct, frozen=True, tag=True):
    """`words` are the job's own parameters. Its input and its output file come with the packet. The process may use
    `cpu_s` and have `memory_bytes` more address space than when it began, plus what it is allowed to hold."""

    words: bytes
    num_bytes: int
    cpu_s: float
    memory_bytes: int


class Began(msgspec.Struct, frozen=True, tag=True):
    """The job's own CPU time is counted from now on, without the imports of a new process."""


class Hold(msgspec.Struct, frozen=True, tag=True):
    """Asks for more memory; answered by `Held`."""

    num_bytes: int


class Held(msgspec.Struct, frozen=True, tag=True):
    is_allowed: bool


class JobDone(msgspec.Struct, frozen=True, tag=True):
    """The output file holds `num_bytes`. With `is_last` the process ends now, because it has grown."""

    words: bytes
    num_bytes: int
    is_last: bool = False


class JobRefused(msgspec.Struct, frozen=True, tag=True):
    """A RequestError."""

    message: str
    code: str | None
    status: int
    is_last: bool = False


class JobFailed(msgspec.Struct, frozen=True, tag=True):
    """`is_memory`: the job needs more memory than it may have. The process ends, for nobody knows its state."""

    is_memory: bool
    text: str = ""


ToProcess: TypeAlias = Job | Held
FromProcess: TypeAlias = Began | Hold | JobDone | JobRefused | JobFailed

_to_process = msgspec.msgpack.Decoder(ToProcess)
_from_process = msgspec.msgpack.Decoder(FromProcess)


class BadPacketError(SaccadeError):
    """A packet that no process of ours writes."""


def encode(packet: ToProcess | FromProcess) -> bytes:
    data = msgspec.msgpack.encode(packet)
    assert len(data) <= MAX_PACKET_BYTES, f"a packet has {len(data)} bytes"
    return data


def read_order(data: bytes) -> Any:
    return _to_process.decode(data)


def read_reply(data: bytes) -> FromProcess:
    """The other side works on untrusted data, so it is not trusted either."""
    try:
        reply: FromProcess = _from_process.decode(data)
    except msgspec.MsgspecError:
        raise BadPacketError(f"{len(data)} bytes are no reply") from None
    return reply


def used_address_space() -> int:
    with open("/proc/self/statm", "rb") as file:  # noqa: PTH123
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def resident_bytes(pid: int | str = "self") -> int:
    with open(f"/proc/{pid}/statm", "rb") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

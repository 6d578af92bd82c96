"""Messages between a pool and its processes: msgpack packets over a Unix socket, never pickle. The data itself is in
anonymous memory files, whose descriptors are sent with the job."""

import os
from typing import Any, TypeAlias

import msgspec

from saccade.errors import SaccadeError

MAX_PACKET_BYTES = 64 * 2**10
MAX_MESSAGE_CHARS = 500


class Job(msgspec.Struct, frozen=True, tag=True):
    """`words` are the job's parameters. The descriptors of its input and output files come with the packet. The process
    may use `cpu_s` of CPU time and `memory_bytes` of additional address space, plus what the pool lets it `Hold`."""

    words: bytes
    num_bytes: int
    cpu_s: float
    memory_bytes: int


class Began(msgspec.Struct, frozen=True, tag=True):
    """The job has started: its CPU time counts from here, without the imports of a new process."""


class Hold(msgspec.Struct, frozen=True, tag=True):
    """Asks for more memory; answered by `Held`."""

    num_bytes: int


class Held(msgspec.Struct, frozen=True, tag=True):
    is_allowed: bool


class JobDone(msgspec.Struct, frozen=True, tag=True):
    """The output file holds `num_bytes`. With `is_last` the process exits now, because it has grown too much."""

    words: bytes
    num_bytes: int
    is_last: bool = False


class JobRefused(msgspec.Struct, frozen=True, tag=True):
    """The job raised a RequestError."""

    message: str
    code: str | None
    status: int
    is_last: bool = False


class JobFailed(msgspec.Struct, frozen=True, tag=True):
    """The job ran out of memory (`is_memory`) or raised another error. The process exits, as its state is unknown."""

    is_memory: bool
    text: str = ""


ToProcess: TypeAlias = Job | Held
FromProcess: TypeAlias = Began | Hold | JobDone | JobRefused | JobFailed

_to_process = msgspec.msgpack.Decoder(ToProcess)
_from_process = msgspec.msgpack.Decoder(FromProcess)


class BadPacketError(SaccadeError):
    """The packet is not one of the messages of this module."""


def encode(packet: ToProcess | FromProcess) -> bytes:
    data = msgspec.msgpack.encode(packet)
    assert len(data) <= MAX_PACKET_BYTES, f"a packet has {len(data)} bytes"
    return data


def read_order(data: bytes) -> Any:
    return _to_process.decode(data)


def read_reply(data: bytes) -> FromProcess:
    """The process handles untrusted data, so its replies are not trusted either."""
    try:
        reply: FromProcess = _from_process.decode(data)
    except msgspec.MsgspecError:
        raise BadPacketError(f"it sent {len(data)} bytes that are not a reply") from None
    return reply


def used_address_space() -> int:
    with open("/proc/self/statm", "rb") as file:  # noqa: PTH123
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def resident_bytes(pid: int | str = "self") -> int:
    with open(f"/proc/{pid}/statm", "rb") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

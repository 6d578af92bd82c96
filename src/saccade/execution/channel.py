"""Messages from one process to several others on the same machine, and their short replies.

A message is stored once, in memory that every process maps. A socket to each reader carries notices of where it is, and
the replies; it also wakes sleeping readers, orders memory accesses, and shows when the other side is gone. Memory and
sockets have no names and are inherited by child processes, so nothing is left behind, however the processes end.
"""

import mmap
import os
import select
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from time import monotonic

import numpy as np
from msgspec import msgpack

from saccade.errors import ConfigError, SaccadeError
from saccade.execution.codec import Bytes, Codec, aligned
from saccade.execution.rank_messages import Done, Heard, OrderOutcome, RankReply

CAPACITY_BYTES = 128 * 2**20
MAX_OUTSTANDING = 128  # messages; their notices and replies always fit into socket buffers
MAX_REPLY_BYTES = 2**16
POLL_S = 0.02  # limits each wait, because another thread may read the reply that this one waits for

_NOTICE = struct.Struct("<BQQQ")  # kind, sequence number, offset, bytes


class _Kind(IntEnum):
    MESSAGE, PING, CLOSE = range(3)


class ReaderGoneError(SaccadeError):
    """A rank has closed its end of the channel."""


class ReaderBehindError(SaccadeError):
    """A rank did not make room for new messages in time."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """A message whose bytes may still be read."""

    sequence: int
    end: int
    sent_at: float


@dataclass(slots=True)
class _Reader:
    rank: int
    socket: socket.socket
    heard_at: float
    acknowledged: int = 0  # the last message it finished
    pinged_at: float | None = None
    is_gone: bool = False


class Sender:
    """Rank 0's end of the channel. Readers are ranks 1 to `num_readers`. Messages are stored one after the other; once
    all are read, the next starts at offset 0. So usually only the first pages are touched: they stay in the CPU cache,
    and the rest costs no memory. Only one thread may send; any may collect, ping and query. `on_reply(rank, reply)` is
    called once per reply, in the thread that read it, and must not call the sender."""

    def __init__(
        self,
        codec: Codec,
        num_readers: int,
        on_reply: Callable[[int, RankReply], None],
        *,
        capacity_bytes: int = CAPACITY_BYTES,
    ) -> None:
        if sys.platform != "linux":
            raise ConfigError(f"several ranks need Linux; this is {sys.platform} (--tensor-parallel-size 1)")
        self._codec, self._on_reply = codec, on_reply
        self._capacity = aligned(capacity_bytes)
        self._sent: deque[_Sent] = deque()
        self.memory_fd = os.memfd_create("saccade-orders")
        self._map_memory()
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(num_readers)]
        self.reader_sockets = {rank: theirs for rank, (_, theirs) in enumerate(pairs, 1)}
        self._readers = {rank: _Reader(rank, ours, monotonic()) for rank, (ours, _) in enumerate(pairs, 1)}
        self._poll = select.poll()
        for reader in self._readers.values():
            reader.socket.setblocking(False)
            self._poll.register(reader.socket, select.POLLIN)
        self._sequence = 0
        self._lock = threading.Lock()

    def release_reader_ends(self) -> None:
        """Call once readers have their ends. Until then this side cannot notice that one is gone."""
        for end in self.reader_sockets.values():
            end.close()

    def close(self) -> None:
        """May be called again."""
        self.release_reader_ends()
        with self._lock:
            if self.memory_fd < 0:
                return
            for reader in self._readers.values():
                reader.is_gone = True
                reader.socket.close()
            os.close(self.memory_fd)
            self.memory_fd = -1
            self._memory = np.empty(0, np.uint8)  # drops the last reference to the mapping

    def send(self, message: object, *, timeout_s: float) -> int:
        """Returns the message's sequence number. Copies its arrays, so it waits for room but not for the readers."""
        packed = self._codec.pack(message)
        start = self._wait_for_room(packed.num_bytes, timeout_s)
        if packed.num_bytes > self._capacity:
            self._capacity = aligned(packed.num_bytes)
            self._map_memory()
        packed.write(self._memory[start : start + packed.num_bytes])
        return self._announce(start, packed.num_bytes)

    def collect(self) -> None:
        with self._lock:
            self._collect()

    def wait(self, timeout_s: float) -> None:
        """Waits until there may be replies, and reads them."""
        self._poll.poll(max(0.0, min(timeout_s, POLL_S)) * 1000)
        self.collect()

    def is_done(self, sequence: int) -> bool:
        """Whether all ranks have finished a message, according to the replies read so far."""
        return all(reader.acknowledged >= sequence for reader in self._readers.values())

    def behind(self) -> dict[int, int]:
        """Counts of unfinished messages by rank, from the replies read so far. Ranks with none are left out."""
        counts = {rank: self._sequence - reader.acknowledged for rank, reader in self._readers.items()}
        return {rank: count for rank, count in counts.items() if count}

    def filenos(self) -> list[int]:
        """Sockets to poll for hang-ups."""
        return [reader.socket.fileno() for reader in self._readers.values() if not reader.is_gone]

    def gone(self) -> list[int]:
        return [rank for rank, reader in self._readers.items() if reader.is_gone]

    def silent_s(self, rank: int, now: float) -> float:
        """How long a rank has owed an answer; 0 if it owes none."""
        with self._lock:
            reader = self._readers[rank]
            owed = [one.sent_at for one in self._sent if one.sequence > reader.acknowledged][:1]
            if reader.pinged_at is not None:
                owed.append(reader.pinged_at)
            return max(0.0, now - max(reader.heard_at, min(owed))) if owed else 0.0

    def forgive(self, now: float) -> None:
        """Makes every rank's silence count from `now`."""
        for reader in self._readers.values():
            reader.heard_at = now

    def ping(self, after_s: float, now: float) -> None:
        """Pings ranks that owe no answer and have been silent for `after_s`."""
        with self._lock:
            for reader in self._readers.values():
                is_idle = reader.acknowledged == self._sequence and reader.pinged_at is None
                if is_idle and not reader.is_gone and now - reader.heard_at > after_s:
                    reader.pinged_at = now
                    self._notify(reader, _Kind.PING)

    def tell_to_close(self) -> None:
        """Tells readers to close once they have read everything already sent."""
        with self._lock:
            for reader in self._readers.values():
                self._notify(reader, _Kind.CLOSE)

    def _map_memory(self) -> None:
        os.ftruncate(self.memory_fd, self._capacity)
        self._memory = np.frombuffer(mmap.mmap(self.memory_fd, self._capacity), np.uint8)

    def _wait_for_room(self, num_bytes: int, timeout_s: float) -> int:
        deadline = monotonic() + timeout_s
        while True:
            with self._lock:
                self._collect()
                self._check_nobody_is_gone()
                if not self._sent:  # any size fits, because the memory can grow
                    return 0
                start = self._sent[-1].end
                if start + num_bytes <= self._capacity and len(self._sent) < MAX_OUTSTANDING:
                    return start
            if monotonic() > deadline:
                slowest = min(self._readers.values(), key=lambda reader: reader.acknowledged)
                count = self._sequence - slowest.acknowledged
                raise ReaderBehindError(
                    f"rank {slowest.rank} is {count} messages behind and has not made room for {timeout_s:g} s"
                )
            self._poll.poll(POLL_S * 1000)

    def _announce(self, start: int, num_bytes: int) -> int:
        with self._lock:
            self._sequence += 1
            self._sent.append(_Sent(self._sequence, start + aligned(num_bytes), monotonic()))
            for reader in self._readers.values():
                self._notify(reader, _Kind.MESSAGE, self._sequence, start, num_bytes)
            self._check_nobody_is_gone()
            return self._sequence

    def _check_nobody_is_gone(self) -> None:
        for rank in self.gone():
            raise ReaderGoneError(f"rank {rank} has closed its end of the channel")

    def _notify(self, reader: _Reader, kind: _Kind, sequence: int = 0, start: int = 0, num_bytes: int = 0) -> None:
        if not reader.is_gone:
            try:
                reader.socket.send(_NOTICE.pack(kind, sequence, start, num_bytes))
            except (BrokenPipeError, ConnectionResetError):
                self._lose(reader)

    def _collect(self) -> None:
        for reader in self._readers.values():
            while not reader.is_gone and (data := self._receive(reader)) is not None:
                reply: RankReply = _decode_reply(data)
                reader.heard_at, reader.pinged_at = monotonic(), None
                if isinstance(reply, Done):
                    assert reply.sequence == reader.acknowledged + 1, f"rank {reader.rank} skipped: {reply}"
                    reader.acknowledged = reply.sequence
                self._on_reply(reader.rank, reply)
        while self._sent and self.is_done(self._sent[0].sequence):
            self._sent.popleft()

    def _receive(self, reader: _Reader) -> bytes | None:
        """None if there is no reply now, or the reader is gone."""
        for _ in range(2):
            try:
                data = reader.socket.recv(MAX_REPLY_BYTES)
            except BlockingIOError:
                return None
            except ConnectionResetError:  # it exited with unread data; its last replies follow the error
                continue
            if data:
                return data
            break
        self._lose(reader)
        return None

    def _lose(self, reader: _Reader) -> None:
        reader.is_gone = True
        self._poll.unregister(reader.socket)


class Receiver:
    """A reader's end of the channel, for use by one thread."""

    def __init__(self, socket_fd: int, memory_fd: int) -> None:
        os.set_inheritable(socket_fd, False)
        os.set_inheritable(memory_fd, False)
        self._socket, self._file = socket.socket(fileno=socket_fd), os.fdopen(memory_fd, "rb", buffering=0)
        self._memory = self._map_memory()

    def receive(self) -> tuple[int, Bytes] | None:
        """Waits for the next message, and answers pings meanwhile. Returns its sequence number and its bytes, which are
        valid until the `Done` reply, or None if no more will come."""
        while notice := self._next_notice():
            kind, sequence, start, num_bytes = _NOTICE.unpack(notice)
            match kind:
                case _Kind.MESSAGE:
                    if start + num_bytes > len(self._memory):  # the memory has grown
                        self._memory = self._map_memory()
                    return sequence, self._memory[start : start + num_bytes]
                case _Kind.PING:
                    self.reply(Heard())
                case _Kind.CLOSE:
                    return None
        return None

    def reply(self, reply: RankReply) -> None:
        """Hardly ever blocks. If the sender is gone, the next `receive` returns None."""
        data = _encode_reply(reply)
        with suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(data)

    def close(self) -> None:
        self._socket.close()
        self._file.close()

    def _map_memory(self) -> Bytes:
        return np.frombuffer(mmap.mmap(self._file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)

    def _next_notice(self) -> bytes:
        """Empty when the sender is gone. Blocks without spinning first, which would take cores from other processes."""
        try:
            return self._socket.recv(_NOTICE.size)
        except ConnectionResetError:
            return b""


_decode_reply = msgpack.Decoder(RankReply).decode


def _encode_reply(reply: RankReply) -> bytes:
    data = msgpack.encode(reply)
    if len(data) <= MAX_REPLY_BYTES:
        return data
    if not isinstance(reply, Done):
        raise SaccadeError(f"a {type(reply).__name__} of {len(data)} bytes is too long; the limit is {MAX_REPLY_BYTES}")
    error = f"SaccadeError: the answer has {len(data)} bytes; the limit is {MAX_REPLY_BYTES}"
    return msgpack.encode(Done(reply.sequence, OrderOutcome(error=error)))

"""Messages between two processes of one machine, over a pair of connected sockets. A message is a list of frames."""

import select
import socket
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from struct import Struct
from threading import Condition, Thread
from time import monotonic

import numpy as np

Buffer = bytes | memoryview

HEAD = Struct("<Q?")  # before each frame: its size, and whether it is the last of its message
SEND_BYTES = 2 * 2**20  # the socket's buffer; Linux lowers this to net.core.wmem_max
PATIENCE_S = 0.005  # with a frame that has begun
RECEIVE_BYTES = 4 * 2**20  # at once, about a millisecond: running requests wait meanwhile
MAX_PARTS = 512  # of one system call, which takes 1024


class OtherEndGoneError(Exception):
    """Nothing more can be received: the other process has closed its end, or has ended."""


class Link:
    """One end of the pair. Any thread may send, and never waits: what the socket does not take at once is kept, and a
    thread sends it. One thread receives. If the other end is gone, messages are lost and receiving is an error."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        self._socket = end
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(end, select.POLLIN)
        self._writable.register(end, select.POLLOUT)
        self._condition = Condition()  # guards the next three
        self._late: deque[list[memoryview]] = deque()
        self._thread: Thread | None = None
        self._is_open = True
        self._frames: list[memoryview] = []  # of the message that is being received
        self._is_last = False
        self._num_taken = 0  # by the current call
        self._expect_head()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, frames: Sequence[Buffer]) -> None:
        """Frames are not copied, so they must not change."""
        parts = []
        for idx, frame in enumerate(frames, start=1):
            parts += [memoryview(HEAD.pack(len(frame), idx == len(frames))), memoryview(frame)]
        with self._condition:
            left = parts if self._late else self._send(parts)
            if left:
                self._late.append(left)
                self._condition.notify_all()
                if self._thread is None:
                    self._thread = Thread(target=self._send_late, name="link", daemon=True)
                    self._thread.start()

    def wait(self, seconds: float | None) -> bool:
        """Whether something can be received within this time, which may be a part of a message; None is for ever."""
        return bool(self._readable.poll(None if seconds is None else seconds * 1000))

    def receive(self) -> list[memoryview] | None:
        """The next message, or None if it is not complete yet. A large one takes several calls."""
        self._num_taken = 0
        while self._fill():
            if self._is_head:
                size, self._is_last = HEAD.unpack(self._part)
                self._expect(np.empty(size, np.uint8).data, is_head=False)
                continue
            self._frames.append(self._part)
            self._expect_head()
            if self._is_last:
                frames, self._frames = self._frames, []
                return frames
        return None

    def flush(self, seconds: float) -> None:
        """Waits until everything is sent, but not longer than this."""
        with self._condition:
            self._condition.wait_for(lambda: not self._late, seconds)

    def close(self) -> None:
        with self._condition:
            self._is_open = False
            self._condition.notify_all()
        self._hang_up()  # wakes the thread
        if self._thread is not None:
            self._thread.join()
        self._socket.close()

    def _hang_up(self) -> None:
        """Both ends can still receive what was sent, and then find that the other is gone. If a send fails for another
        reason than that, half a message may be out, and nothing may follow it."""
        with suppress(OSError):  # the other end is gone
            self._socket.shutdown(socket.SHUT_RDWR)

    def _send(self, parts: list[memoryview]) -> list[memoryview]:
        """The same list, with what is left when the socket takes no more. Nothing is if sending fails."""
        while parts:
            try:
                num_bytes = self._socket.sendmsg(parts[:MAX_PARTS])
            except BlockingIOError:
                break
            except OSError:
                parts.clear()
                self._hang_up()
                break
            while parts and num_bytes >= len(parts[0]):
                num_bytes -= len(parts.pop(0))
            if num_bytes:
                parts[0] = parts[0][num_bytes:]
        return parts

    def _send_late(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._late or not self._is_open)
                if not self._is_open:
                    return
                parts = self._late[0]
            if self._send(parts):
                self._writable.poll()
                continue
            with self._condition:
                self._late.popleft()
                self._condition.notify_all()

    def _expect_head(self) -> None:
        self._expect(memoryview(bytearray(HEAD.size)), is_head=True)

    def _expect(self, part: memoryview, *, is_head: bool) -> None:
        self._part, self._is_head, self._num_received = part, is_head, 0

    def _fill(self) -> bool:
        """Whether the part that is expected is complete. Waits a little for the rest of a frame: a receiver that comes
        back only after a step would get a large one in many parts."""
        until = 0.0
        while self._num_received < len(self._part):
            if self._num_taken >= RECEIVE_BYTES:
                return False
            try:
                part = self._part[self._num_received :]
                num_bytes = self._socket.recv_into(part[: RECEIVE_BYTES - self._num_taken])
            except BlockingIOError:
                until = until or monotonic() + PATIENCE_S
                if self._is_head or not self.wait(max(until - monotonic(), 0.0)):
                    return False
                continue
            except ConnectionError:
                num_bytes = 0
            if not num_bytes:
                raise OtherEndGoneError
            self._num_received += num_bytes
            self._num_taken += num_bytes
        return True

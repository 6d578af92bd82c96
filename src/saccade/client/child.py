"""The parent's side of the worker process: start it, exchange messages, wait for it, end it."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import zmq

from saccade.client.spare import Spare
from saccade.errors import ConfigError
from saccade.wire.messages import (
    COMMANDS,
    COMMANDS_THREAD,
    IO_THREADS,
    REPLIES,
    REPLIES_THREAD,
    EngineCommand,
    EngineReply,
    PromptArrays,
    decode_reply,
    encode,
)

RECONNECT_MS = 20  # the worker's socket appears only after its imports
TERMINATE_S, KILL_S = 3.0, 5.0
POLL_S = 0.05
MAX_MESSAGES = 64  # messages, then the event loop does what else is due

Hear = Callable[[EngineReply], None]
OnProblem = Callable[[Exception], None]


class Child:
    """A worker and its sockets, in a new folder that only this user may enter. `hide` removes the folder once both ends
    are connected, so that nobody else can connect and a killed parent leaves nothing behind."""

    def __init__(self, spare: Spare | None = None) -> None:
        worker = spare or Spare()
        self.process, self.folder = worker.process, worker.folder
        try:
            _check_length(self.folder)
            self._open_sockets()
        except BaseException:
            with worker:
                raise
        worker.is_taken = True

    def _open_sockets(self) -> None:
        self._context = zmq.Context(io_threads=IO_THREADS)
        self._replies, self._commands = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        for socket in (self._replies, self._commands):
            socket.setsockopt(zmq.LINGER, 0)
            # No limit, so that sending never blocks; the worker refuses requests when it has too many.
            socket.set_hwm(0)
        self._commands.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._commands.setsockopt(zmq.AFFINITY, COMMANDS_THREAD)
        self._replies.setsockopt(zmq.AFFINITY, REPLIES_THREAD)
        self._replies.bind(f"ipc://{self.folder / REPLIES}")
        self._commands.connect(f"ipc://{self.folder / COMMANDS}")

    def send(self, command: EngineCommand, arrays: PromptArrays | None = None) -> None:
        """Never blocks. Arrays are not copied and must not change; a prompt's never do."""
        self._commands.send_multipart([encode(command), *(arrays or ())], zmq.NOBLOCK, copy=False)

    def listen(self, hear: Hear, on_problem: OnProblem) -> None:
        """Calls `hear` with every message, straight from the running event loop: a task would add latency."""
        self._hear, self._on_problem = hear, on_problem
        loop = asyncio.get_running_loop()
        loop.add_reader(self._replies.FD, self._read)
        loop.call_soon(self._read)  # ZeroMQ's descriptor may signal nothing until pending messages have been read

    def _read(self) -> None:
        if self._replies.closed:
            return
        try:
            for _ in range(MAX_MESSAGES):
                self._hear(decode_reply(self._replies.recv(zmq.NOBLOCK)))
        except zmq.Again:
            return
        except Exception as error:  # later messages could not be understood either
            asyncio.get_running_loop().remove_reader(self._replies.FD)
            self._on_problem(error)
        else:
            asyncio.get_running_loop().call_soon(self._read)

    def hide(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    async def wait(self) -> int:
        """The exit code, negative for a signal. Polls instead of blocking a thread, which could not be cancelled."""
        while (code := self.process.poll()) is None:
            await asyncio.sleep(POLL_S)
        return code

    async def close(self, wait_s: float) -> None:
        """Wait for the process to exit; if it does not, terminate it, then kill it. Cleans up in any case."""
        try:
            if not await self._has_left(wait_s):
                self.process.terminate()
                if not await self._has_left(TERMINATE_S):
                    self.process.kill()
                    await self._has_left(KILL_S)
        finally:
            self.process.kill()
            assert self.process.stdin is not None, "it is a pipe"
            self.process.stdin.close()
            asyncio.get_running_loop().remove_reader(self._replies.FD)
            self._replies.close()
            self._commands.close()
            self._context.term()
            self.hide()

    async def _has_left(self, wait_s: float) -> bool:
        try:
            await asyncio.wait_for(self.wait(), wait_s)
        except TimeoutError:
            return False
        return True


def _check_length(folder: Path) -> None:
    length = len(str(folder / COMMANDS))
    if length > zmq.IPC_PATH_MAX_LEN:
        raise ConfigError(
            f"sockets in the temporary folder have a path of {length} characters; the limit is {zmq.IPC_PATH_MAX_LEN} "
            "(set TMPDIR to a folder with a shorter path)"
        )

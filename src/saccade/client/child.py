"""The parent's side of the worker process: start it, exchange messages, wait for it, end it."""

import asyncio
from collections.abc import Callable

from saccade.client.spare import Spare
from saccade.wire.link import Link, OtherEndGoneError
from saccade.wire.messages import EngineCommand, EngineReply, PromptArrays, decode_reply, encode

TERMINATE_S, KILL_S = 3.0, 5.0
POLL_S = 0.05
MAX_MESSAGES = 64  # messages, then the event loop does what else is due

Hear = Callable[[EngineReply], None]
OnProblem = Callable[[Exception], None]


class Child:
    """A worker and the socket to it. A spare worker can be taken over once, so a restart gets a new one."""

    def __init__(self, spare: Spare | None = None) -> None:
        worker = Spare() if spare is None or spare.is_taken else spare
        self.process, self._link = worker.process, Link(worker.socket)
        worker.is_taken = True

    def send(self, command: EngineCommand, arrays: PromptArrays = ()) -> None:
        """Never blocks. Arrays are not copied and must not change; a prompt's never do."""
        self._link.send([encode(command), *(array.reshape(-1).data for array in arrays)])

    def listen(self, hear: Hear, on_problem: OnProblem) -> None:
        """Calls `hear` with every message, straight from the running event loop: a task would add latency."""
        self._hear, self._on_problem = hear, on_problem
        asyncio.get_running_loop().add_reader(self._link.fileno(), self._read)

    def _read(self) -> None:
        try:
            for _ in range(MAX_MESSAGES):
                if (frames := self._link.receive()) is None:
                    return
                self._hear(decode_reply(frames[0]))
        except Exception as error:  # later messages could not be understood either
            asyncio.get_running_loop().remove_reader(self._link.fileno())
            if not isinstance(error, OtherEndGoneError):  # the process ends: see `wait`
                self._on_problem(error)

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
            asyncio.get_running_loop().remove_reader(self._link.fileno())
            self._link.close()

    async def _has_left(self, wait_s: float) -> bool:
        try:
            await asyncio.wait_for(self.wait(), wait_s)
        except TimeoutError:
            return False
        return True

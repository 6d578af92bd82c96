"""A rank's process: `python -m saccade.execution.rank`, started only by `saccade.execution.rank_processes`.

It executes orders one after the other and reports each outcome. The first line of standard input has its settings; the
input stays open while its parent lives. SIGTERM ends it at once, because it leaves nothing to clean up.
"""

import io
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import TextIO

import msgspec

from saccade.errors import ConfigError, SaccadeError
from saccade.execution.channel import Receiver
from saccade.execution.codec import Codec
from saccade.execution.rank_messages import (
    Done,
    NotStarted,
    OrderOutcome,
    RankExecutor,
    RankReady,
    RankStart,
    describe,
)
from saccade.processes import EXIT_FAILED, EXIT_ORPHANED, end_with_input, end_with_parent, print_error


def main() -> int:
    end_with_parent()
    line = sys.stdin.buffer.readline()
    if not line:
        return EXIT_ORPHANED
    start = msgspec.json.decode(line, type=RankStart)
    if os.getppid() != start.parent_pid:  # the parent exited before end_with_parent took effect
        return EXIT_ORPHANED
    end_with_input()
    os.set_inheritable(start.store_fd, False)
    sys.stderr = _Prefixed(sys.stderr, f"rank {start.rank}: ")
    receiver = Receiver(start.socket_fd, start.memory_fd)
    try:
        executor = _find_factory(start.factory)(start)
        receiver.reply(RankReady(executor.facts))
    except Exception as error:
        if not isinstance(error, SaccadeError):
            print_error(error)
        text = str(error) if isinstance(error, SaccadeError) else describe(error)
        receiver.reply(NotStarted(text, is_config=isinstance(error, ConfigError)))
        return EXIT_FAILED
    serve(receiver, executor)
    executor.close()
    return 0


def serve(receiver: Receiver, executor: RankExecutor) -> None:
    """Executes orders until rank 0 says to stop or is gone."""
    codec = Codec(*executor.order_types)
    while (received := receiver.receive()) is not None:
        sequence, packed = received
        error = ""
        try:
            executor.execute(codec.unpack(packed))
        except Exception as raised:  # rank 0 decides whether this is fatal
            print_error(raised)
            error = describe(raised)
        receiver.reply(Done(sequence, OrderOutcome(digest=executor.take_digest(), error=error)))


def _find_factory(path: str) -> Callable[[RankStart], RankExecutor]:
    module, _, name = path.partition(":")
    factory: Callable[[RankStart], RankExecutor] = getattr(import_module(module), name)
    return factory


class _Prefixed(io.TextIOBase):
    """Prefixes every line, so that the output of several processes can be told apart."""

    def __init__(self, target: TextIO, prefix: str) -> None:
        self._target, self._prefix = target, prefix
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        if lines:
            self._target.write("".join(f"{self._prefix}{line}\n" for line in lines))
            self._target.flush()
        return len(text)

    def flush(self) -> None:
        """Does nothing: unfinished lines are held back, so that lines of two processes do not mix."""

    def fileno(self) -> int:
        return self._target.fileno()

    def isatty(self) -> bool:
        return self._target.isatty()


if __name__ == "__main__":
    sys.exit(main())

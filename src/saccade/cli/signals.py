"""SIGTERM for commands that still have something to show or to stop."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from saccade.cli.commands import EXIT_TERMINATED


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does: `finally` blocks run. Then the command exits with 143."""
    is_ended = False

    def end(number: int, frame: object) -> None:
        nonlocal is_ended
        is_ended = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout` sends it twice
        try:
            tasks = asyncio.all_tasks()
        except RuntimeError:  # no event loop is running
            raise SystemExit(EXIT_TERMINATED) from None
        for task in tasks:  # uvloop drops what is raised while it reads a socket
            task.cancel()

    earlier = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except asyncio.CancelledError:
        if not is_ended:
            raise
        raise SystemExit(EXIT_TERMINATED) from None
    finally:
        signal.signal(signal.SIGTERM, earlier)

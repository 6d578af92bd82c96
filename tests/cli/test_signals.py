"""SIGTERM ends a command as Ctrl-C does."""

import asyncio
import signal

import pytest

from saccade.bench.load.client import run
from saccade.cli.signals import ended_by_sigterm


async def _terminated() -> None:
    signal.raise_signal(signal.SIGTERM)
    await asyncio.Event().wait()


@pytest.mark.parametrize("has_loop", [False, True])
def test_sigterm_lets_the_command_finish_what_it_shows_however_often_it_comes(has_loop: bool) -> None:
    steps = []
    earlier = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stop, ended_by_sigterm():
        try:
            if has_loop:
                run(_terminated())
            else:
                signal.raise_signal(signal.SIGTERM)
            steps.append("went on")
        finally:
            signal.raise_signal(signal.SIGTERM)
            steps.append("shown")
    assert stop.value.code == 143 and steps == ["shown"] and signal.getsignal(signal.SIGTERM) is earlier


def test_a_cancelled_command_without_sigterm_stays_cancelled() -> None:
    with pytest.raises(asyncio.CancelledError), ended_by_sigterm():
        raise asyncio.CancelledError

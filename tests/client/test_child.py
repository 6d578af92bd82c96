"""All messages of a worker reach its parent, up to the first invalid one."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from socket import socketpair
from types import SimpleNamespace
from typing import Any, cast

import pytest

from saccade.client.child import MAX_MESSAGES, Child
from saccade.client.spare import Spare
from saccade.wire.link import Link
from saccade.wire.messages import EngineReply, Stage, encode
from tests.server.fake import HANG_S


@pytest.fixture
def spare() -> Spare:
    """A process that does nothing and exits when its input closes."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    ours, workers = socketpair()
    return cast(Spare, SimpleNamespace(process=process, socket=ours, workers=workers, is_taken=False))


def heard(spare: Spare, said: list[bytes], is_enough: Callable[[list[Any]], bool]) -> list[Any]:
    """The messages and problems that a parent gets if it starts to listen after everything was sent."""

    async def run() -> list[Any]:
        child, found = Child(spare), list[EngineReply | Exception]()
        worker = Link(cast(Any, spare).workers)
        for data in said:
            worker.send([data])
        child.listen(found.append, found.append)
        async with asyncio.timeout(HANG_S):
            while not is_enough(found):
                await asyncio.sleep(0.001)
        worker.close()
        await child.close(0.0)
        return found

    return asyncio.run(run())


def test_messages_beyond_one_batch_are_all_read(spare: Spare) -> None:
    said = [Stage(str(i)) for i in range(3 * MAX_MESSAGES + 1)]
    assert heard(spare, [encode(message) for message in said], lambda found: len(found) == len(said)) == said


def test_nothing_is_read_after_an_invalid_message(spare: Spare) -> None:
    said = [encode(Stage("1")), b"nonsense", *[encode(Stage("2"))] * 3]
    first, problem, *rest = heard(spare, said, lambda found: len(found) > 1)
    assert first == Stage("1") and isinstance(problem, Exception) and not rest

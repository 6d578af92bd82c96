"""Many large bodies at once: a few are read at a time, callers take turns, and slow clients hold nobody up."""

import asyncio
from typing import Any

import pytest

from saccade.server.http.exchange import FREE_BYTES, HttpExchange
from saccade.server.sharing import read_turns
from saccade.server.sharing.read_turns import ReadTurns
from tests.server.fake import HANG_S

PART = b"x" * FREE_BYTES


def exchange_with(receive: Any) -> HttpExchange:
    async def send(message: Any) -> None:
        raise AssertionError

    return HttpExchange({"type": "http", "headers": []}, receive, send)


async def read(turns: ReadTurns, receive: Any) -> int:
    parts = await exchange_with(receive).body(limit=2**30, timeout_s=HANG_S, turns=turns)
    return sum(map(len, parts))


def test_only_a_few_bodies_are_read_at_a_time() -> None:
    """Everybody sends at once: a read takes one turn of the loop. The first part of a body needs no turn."""
    turns, num_read, most = ReadTurns(8), 0, 0

    def sender(num_parts: int) -> Any:
        left = num_parts

        async def receive() -> Any:
            nonlocal left, num_read, most
            if left == 0:  # only the end of the connection can come now
                await asyncio.sleep(HANG_S)
            is_more = left < num_parts
            num_read += is_more
            most = max(most, num_read)
            await asyncio.sleep(0)
            num_read -= is_more
            left -= 1
            return {"type": "http.request", "body": PART, "more_body": left > 0}

        return receive

    async def run() -> list[int]:
        return await asyncio.wait_for(asyncio.gather(*(read(turns, sender(5)) for _ in range(300))), HANG_S)

    assert asyncio.run(run()) == [5 * len(PART)] * 300
    assert most == 8


def test_callers_take_turns() -> None:
    async def run() -> list[str]:
        turns, order = ReadTurns(1), list[str]()

        async def part(caller: str) -> None:
            async with turns.turn(caller):
                order.append(caller)
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(part(caller)) for caller in ["flood"] * 40 + ["other"]]
        await asyncio.wait_for(asyncio.gather(*tasks), HANG_S)
        return order

    order = asyncio.run(run())
    assert order.index("other") <= 2 and len(order) == 41


def test_a_slow_client_loses_its_turn_and_is_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_turns, "PATIENCE_S", 0.01)

    async def run() -> None:
        turns, slow, sends = ReadTurns(1), asyncio.Event(), asyncio.Event()

        async def hesitate() -> None:
            async with turns.turn("slow"):
                slow.set()
                await sends.wait()

        task = asyncio.create_task(hesitate())
        await slow.wait()
        for _ in range(3):
            async with turns.turn("fast"):
                pass
        sends.set()
        await task
        async with turns.turn("fast"):
            assert turns._num_free == 0, "a turn that ended twice is freed once"

    asyncio.run(asyncio.wait_for(run(), HANG_S))


def test_a_client_that_leaves_passes_its_turn_on() -> None:
    async def run() -> None:
        turns = ReadTurns(1)

        async def part() -> None:
            async with turns.turn("me"):
                await asyncio.sleep(0)

        async with turns.turn("me"):
            waits, leaves, last = (asyncio.create_task(part()) for _ in range(3))
            await asyncio.sleep(0)
            leaves.cancel()
        waits.cancel()  # it has just got the turn
        await asyncio.wait({waits, leaves, last})
        assert waits.cancelled() and leaves.cancelled() and not last.cancelled()
        assert turns._num_free == 1 and not turns._queue

    asyncio.run(asyncio.wait_for(run(), HANG_S))

"""Freed memory is returned to the system while no request is being prepared."""

import asyncio

import pytest

from saccade.server.sharing import freed_memory
from saccade.server.sharing.admission import Admission
from saccade.server.sharing.freed_memory import FreedMemory

MIB = 2**20


class Memory:
    """A fake of this process's memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_mib, self.num_given_back = 100, 0
        monkeypatch.setattr(freed_memory, "is_supported", lambda: True)
        monkeypatch.setattr(freed_memory, "resident_bytes", lambda: self.num_mib * MIB)
        monkeypatch.setattr(freed_memory, "CHECK_S", 0.0)
        monkeypatch.setattr("saccade.server.sharing.freed_memory.ctypes.CDLL", lambda name: self)

    def malloc_trim(self, spare: int) -> None:
        self.num_given_back += 1
        self.num_mib = 120


def test_memory_is_returned_once_it_has_grown_and_nobody_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(monkeypatch)
    admission = Admission(max_inside=1, max_reading=1, max_pending=1, max_pending_bytes=MIB, retry_after_s=1.0)
    found = FreedMemory(admission)
    worth = [found.is_worth_it]
    for memory.num_mib, admission.pending_bytes in ((500, 1), (500, 0)):
        worth.append(found.is_worth_it)
    assert worth == [False, False, True], "it has grown, and no request is being prepared"

    async def run() -> None:
        running = asyncio.create_task(found.run())
        while not memory.num_given_back:
            await asyncio.sleep(0)
        memory.num_mib = 150
        for _ in range(100):
            await asyncio.sleep(0)
        running.cancel()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert memory.num_given_back == 1 and not found.is_worth_it, "30 MiB are not worth the work"

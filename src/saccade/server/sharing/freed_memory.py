"""Returns freed memory to the system. The C library keeps it per thread, close to a gigabyte after a few hundred large
bodies at once."""

import asyncio
import ctypes

from saccade.jobs.packets import resident_bytes
from saccade.jobs.pool_process import is_supported
from saccade.server.sharing.admission import Admission

CHECK_S = 1.0
SPARE_BYTES = 32 * 2**20  # less growth is not worth the work


class FreedMemory:
    """Trims memory while no request is being prepared. That takes 0.1 s for a gigabyte, in a thread."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._floor = resident_bytes() if is_supported() else 0

    async def run(self) -> None:
        while is_supported():
            await asyncio.sleep(CHECK_S)
            if self.is_worth_it:
                await asyncio.to_thread(self.give_back)

    @property
    def is_worth_it(self) -> bool:
        return self._admission.pending_bytes == 0 and resident_bytes() > self._floor + SPARE_BYTES

    def give_back(self) -> None:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
        if trim is not None:
            trim(0)
        self._floor = resident_bytes()

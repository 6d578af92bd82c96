"""A semaphore for threads that is fair between callers."""

from threading import Event, Lock

from saccade.jobs.fair_queue import FairQueue


class FairSlots:
    def __init__(self, num: int) -> None:
        self._num_free = num
        self._queue: FairQueue[Event] = FairQueue()
        self._lock = Lock()

    def acquire(self, caller: str) -> None:
        with self._lock:
            if self._num_free:
                self._num_free -= 1
                return
            mine = Event()
            self._queue.put(caller, mine)
        mine.wait()

    def release(self) -> None:
        with self._lock:
            if self._queue:
                self._queue.take().set()
            else:
                self._num_free += 1

"""A thread pool and a semaphore that are fair between callers."""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from threading import Condition, Event, Lock, Thread
from time import monotonic
from typing import Any, TypeVar

from saccade.jobs.fair_queue import FairQueue

T = TypeVar("T")

IDLE_S = 10.0  # a thread that has been idle for this long ends


class FairThreads:
    """At most `most` threads, started on demand. Starting a thread blocks until it runs, and `submit` may be called in
    an event loop, so threads start each other: one more than have work is kept waiting for the next piece."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._queue: FairQueue[tuple[Future[Any], Callable[[], Any], float]] = FairQueue()  # and since when
        self._lock = Condition()
        self._num_threads = self._num_idle = 0
        self._is_closed = False

    def submit(self, work: Callable[[], T], caller: str = "") -> Future[T]:
        """Cancelling the future drops the work if it has not started."""
        future: Future[T] = Future()
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"{self._name} threads have ended")
            self._queue.put(caller, (future, work, monotonic()))
            is_first = self._num_threads == 0
            self._num_threads += is_first
            self._lock.notify()
        if is_first:
            self._start()
        return future

    @property
    def oldest_s(self) -> float:
        """How long the oldest work has waited for a thread."""
        with self._lock:
            now = monotonic()
            return now - min((since for future, _, since in self._queue if not future.cancelled()), default=now)

    def shutdown(self) -> None:
        """Cancels work that has not started. Running work is not interrupted."""
        with self._lock:
            self._is_closed = True
            left = list(self._queue)
            self._queue.clear()
            self._lock.notify_all()
        for future, *_ in left:
            future.cancel()

    def _start(self) -> None:
        """Starts a thread that `_num_threads` already counts."""
        try:
            Thread(target=self._work, name=self._name, daemon=True).start()
        except RuntimeError:
            with self._lock:
                self._num_threads -= 1
            raise

    def _work(self) -> None:
        while self._take_one():
            pass

    def _take_one(self) -> bool:
        """Does one piece of work. Returns False when the thread is no longer needed."""
        with self._lock:
            self._num_idle += 1
            self._lock.wait_for(lambda: self._queue or self._is_closed, IDLE_S)
            self._num_idle -= 1
            if not self._queue:
                self._num_threads -= 1
                return False
            future, work, _ = self._queue.take()
            is_last = self._num_idle == 0 and self._num_threads < self._most
            self._num_threads += is_last
        if is_last:
            with suppress(RuntimeError):  # the system allows no more threads; make do with the existing ones
                self._start()
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        finally:
            del future, work  # the error refers to this frame; a reference back would be a cycle
        return True


class FairSlots:
    """A semaphore for threads."""

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

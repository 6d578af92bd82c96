"""Threads that take work in an order that is fair between callers."""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from threading import Condition, Thread
from typing import Any, TypeVar

from saccade.jobs.fair_line import FairLine

T = TypeVar("T")

IDLE_S = 10.0  # after which a thread ends that has nothing to do


class FairThreads:
    """At most `most` threads, started when they are needed: by another of them, because whoever hands work in may be an
    event loop, and starting a thread waits until it runs. So one more than have work waits for it."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._line: FairLine[tuple[Future[Any], Callable[[], Any]]] = FairLine()
        self._lock = Condition()
        self._num_threads = self._num_idle = 0
        self._is_closed = False

    def submit(self, work: Callable[[], T], caller: str = "") -> Future[T]:
        """Cancelling the future takes the work out of the line."""
        future: Future[T] = Future()
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"{self._name} threads have ended")
            self._line.put(caller, (future, work))
            is_first = self._num_threads == 0
            self._num_threads += is_first
            self._lock.notify()
        if is_first:
            self._start()
        return future

    def shutdown(self) -> None:
        """Cancels what has not begun. What runs goes on."""
        with self._lock:
            self._is_closed = True
            left = list(self._line)
            self._line.clear()
            self._lock.notify_all()
        for future, _ in left:
            future.cancel()

    def _start(self) -> None:
        """One that is counted already."""
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
        """Does one piece of work. Returns False when the thread is not needed any more."""
        with self._lock:
            self._num_idle += 1
            self._lock.wait_for(lambda: self._line or self._is_closed, IDLE_S)
            self._num_idle -= 1
            if not self._line:
                self._num_threads -= 1
                return False
            future, work = self._line.take()
            is_last = self._num_idle == 0 and self._num_threads < self._most
            self._num_threads += is_last
        if is_last:
            with suppress(RuntimeError):  # the system has no more threads: those that are there go on
                self._start()
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        finally:
            del future, work  # the error knows this frame, which must not know the error
        return True

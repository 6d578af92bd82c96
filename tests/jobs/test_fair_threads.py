"""Threads that take work in a fair order and never block the event loop."""

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

import pytest

from saccade.jobs import fair_threads
from saccade.jobs.fair_threads import FairSlots, FairThreads

WAIT_S = 60.0


@contextmanager
def one_thread() -> Iterator[tuple[FairThreads, threading.Event]]:
    """The thread is busy until the event is set."""
    threads, begun, go = FairThreads(1, "test"), threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        go.wait(WAIT_S)

    threads.submit(hold)
    assert begun.wait(WAIT_S)
    try:
        yield threads, go
    finally:
        go.set()
        threads.shutdown()


def test_callers_take_turns() -> None:
    order: list[str] = []
    with one_thread() as (threads, go):
        made = [threads.submit(partial(order.append, "flood"), "flood") for _ in range(40)]
        made.append(threads.submit(partial(order.append, "other"), "other"))
        go.set()
        for future in made:
            future.result(WAIT_S)
    assert order.index("other") <= 1 and len(order) == 41


def test_work_that_is_cancelled_or_shut_down_does_not_run() -> None:
    ran: list[int] = []
    with one_thread() as (threads, go):
        first, second = threads.submit(partial(ran.append, 1)), threads.submit(partial(ran.append, 2))
        assert first.cancel()
        go.set()
        second.result(WAIT_S)
    with one_thread() as (threads, go):
        late = threads.submit(partial(ran.append, 3))
        threads.shutdown()
        assert late.cancelled()
        with pytest.raises(RuntimeError, match="have ended"):
            threads.submit(partial(ran.append, 4))
    assert ran == [2]


def test_a_busy_thread_starts_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting a thread blocks until it runs, which can be too long for an event loop."""
    starters: list[str] = []

    class Noting(threading.Thread):
        def start(self) -> None:
            starters.append(threading.current_thread().name)
            super().start()

    monkeypatch.setattr(fair_threads, "Thread", Noting)
    threads, all_run = FairThreads(3, "test"), threading.Barrier(4)
    made: list[Future[int]] = [threads.submit(partial(all_run.wait, WAIT_S)) for _ in range(3)]
    all_run.wait(WAIT_S)
    for future in made:
        future.result(WAIT_S)
    threads.shutdown()
    assert starters.count(threading.current_thread().name) == 1 and starters.count("test") == 2


def test_existing_threads_do_the_work_if_no_more_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    threads = FairThreads(3, "test")
    with monkeypatch.context() as patch:
        patch.setattr(fair_threads, "Thread", Failing)
        with pytest.raises(RuntimeError, match="new thread"):
            threads.submit(int)
    assert threads.submit(int).result(WAIT_S) == 0
    monkeypatch.setattr(fair_threads, "Thread", Failing)
    assert [threads.submit(int).result(WAIT_S) for _ in range(5)] == [0] * 5
    threads.shutdown()


def test_an_error_holds_no_reference_to_its_work() -> None:
    """A refused request must not stay in memory until the next garbage collection."""

    class Body:
        pass

    def refuse(body: Body) -> None:
        raise ValueError

    threads, body = FairThreads(1, "test"), Body()
    gone = weakref.ref(body)
    gc.disable()
    try:
        future = threads.submit(partial(refuse, body))
        with pytest.raises(ValueError):
            future.result(WAIT_S)
        threads.submit(lambda: None).result(WAIT_S)  # the thread has let go of the first
        del future, body
        assert gone() is None
    finally:
        gc.enable()
        threads.shutdown()


def test_slots_are_given_in_turn() -> None:
    slots, order, lock = FairSlots(1), list[str](), threading.Lock()
    slots.acquire("flood")

    def work(name: str) -> None:
        slots.acquire(name)
        with lock:
            order.append(name)
        slots.release()

    names = ["flood"] * 20 + ["other"]
    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    while len(slots._queue) < len(names):
        pass
    slots.release()
    for thread in threads:
        thread.join(WAIT_S)
    assert order.index("other") <= 1 and len(order) == len(names)
    slots.acquire("again")


def test_threads_start_again_after_being_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_threads, "IDLE_S", 0.01)
    threads = FairThreads(2, "short-lived")
    for _ in range(3):
        assert threads.submit(lambda: 5).result(WAIT_S) == 5
        for thread in threading.enumerate():
            if thread.name == "short-lived":
                thread.join(WAIT_S)
        assert threads._num_threads == threads._num_idle == 0
    threads.shutdown()

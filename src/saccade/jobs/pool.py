"""A few processes for work on untrusted data. One job never hurts another: a process is killed and replaced when its
job exceeds its CPU time or memory, passes its deadline, or loses its client.

Jobs with a small estimated cost go before large ones, and large ones never occupy all processes. A large job that has
waited long enough goes before newer small ones. Among small jobs, and among large ones, callers take turns.
"""

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from saccade.errors import SaccadeError
from saccade.jobs.fair_queue import FairQueue
from saccade.jobs.pool_process import JobLimits, JobOutput, PoolProcess

QUEUE_POLL_S = 0.5  # how often a waiting job checks that its client is still there; hundreds may be waiting
SMALL_S = 0.25  # estimated seconds up to which a job is small
MIN_COST_S = 0.001  # of a job, between callers
CLOSE_S = 5.0
PATIENCE = 4.0  # a job waits behind newer ones for at most this many times its estimated cost

_log = logging.getLogger(__name__)


class PoolClosedError(SaccadeError):
    """The server is shutting down."""


@dataclass(eq=False, slots=True)
class _Waiting:
    caller: str
    cost_s: float
    since: float = field(default_factory=monotonic)
    ready: threading.Event = field(default_factory=threading.Event)
    process: PoolProcess | None = None

    @property
    def is_large(self) -> bool:
        return self.cost_s > SMALL_S

    @property
    def rank(self) -> float:
        """The lowest rank goes first."""
        return self.since + PATIENCE * self.cost_s


class Pool:
    """At most `size` processes of one module. The first starts at once, the others on demand. Any number of threads may
    run jobs; each waits for its own."""

    def __init__(self, module: str, size: int, *words: str, fds: tuple[int, ...] = ()) -> None:
        assert size >= 2, "large jobs leave one process to small ones"
        self._module, self.size, self._words, self._fds = module, size, words, fds
        self._lock = threading.Condition()
        self._idle: list[PoolProcess] = []
        self._busy: dict[PoolProcess, bool] = {}  # True if its job is large
        self._small: FairQueue[_Waiting] = FairQueue()
        self._large: FairQueue[_Waiting] = FairQueue()
        self._wanted = 1
        self._is_closed = False
        self.num_killed = 0
        # Linux kills the processes when the thread that started them ends, so that thread lives as long as the pool.
        self._keeper = threading.Thread(target=self._keep, name=f"{module} processes", daemon=True)
        self._keeper.start()

    def run(
        self,
        words: bytes,
        data: tuple[bytes, ...],
        limits: JobLimits,
        *,
        cost_s: float = 0.0,
        caller: str = "",
        hold: Callable[[int], None] = lambda num_bytes: None,
        check_cancelled: Callable[[], None] = lambda: None,
    ) -> JobOutput:
        """The result of one job. `cost_s` is an estimate that only affects the order. `hold` and `check_cancelled`
        are as in an Allowance; an error they raise ends the job. Also raises the job's RequestError, a JobKilledError
        or a ProcessLostError."""
        process = self._take(_Waiting(caller, cost_s), check_cancelled)
        try:
            return process.run(words, data, limits, hold, check_cancelled)
        finally:
            self._give_back(process)

    @property
    def num_waiting(self) -> int:
        with self._lock:
            return len(self._small) + len(self._large)

    @property
    def oldest_s(self) -> float:
        """How long the oldest waiting job has waited."""
        with self._lock:
            return monotonic() - min((one.since for one in (*self._small, *self._large)), default=monotonic())

    @property
    def num_busy(self) -> int:
        with self._lock:
            return len(self._busy)

    def pids(self) -> list[int]:
        with self._lock:
            return [process.pid for process in (*self._idle, *self._busy)]

    def close(self) -> None:
        """Kills all processes. May be called again."""
        with self._lock:
            self._is_closed = True
            idle = self._idle
            self._idle = []
            for process in self._busy:
                process.stop()
            for queue in (self._small, self._large):
                for waiting in queue:
                    waiting.ready.set()
                queue.clear()
            self._lock.notify_all()
            self._lock.wait_for(lambda: not self._busy, CLOSE_S)  # the threads that run jobs give them back
        for process in idle:
            process.kill()
        self._keeper.join()

    def _take(self, waiting: _Waiting, check_cancelled: Callable[[], None]) -> PoolProcess:
        with self._lock:
            if self._is_closed:
                raise PoolClosedError("the server is shutting down")
            cost = max(waiting.cost_s, MIN_COST_S)
            self._queue_of(waiting).put(waiting.caller, waiting, cost=cost, rank=waiting.rank)
            self._dispatch()
        try:
            while not waiting.ready.wait(QUEUE_POLL_S):
                check_cancelled()
        except BaseException:
            self._forget(waiting)
            raise
        if waiting.process is None:
            raise PoolClosedError("the server is shutting down")
        return waiting.process

    def _forget(self, waiting: _Waiting) -> None:
        with self._lock:
            self._queue_of(waiting).leave(waiting.caller, waiting)
        if waiting.process is not None:
            self._give_back(waiting.process)

    def _give_back(self, process: PoolProcess) -> None:
        is_alive = process.is_alive
        if not is_alive or self._is_closed:
            process.kill()
        with self._lock:
            del self._busy[process]
            if self._is_closed:
                self._lock.notify_all()
                return
            if is_alive:
                self._idle.append(process)
            else:
                self.num_killed += process.was_killed
                self._wanted = max(1, len(self._idle) + len(self._busy))
            self._dispatch()

    def _dispatch(self) -> None:
        """Hands idle processes to waiting jobs, and asks for more if there are too few. Needs the lock."""
        for process in [process for process in self._idle if not process.is_alive]:  # it died while idle
            self._idle.remove(process)
            process.kill()
        while self._idle and (chosen := self._next()) is not None:
            process = self._idle.pop()
            self._busy[process] = chosen.is_large
            chosen.process = process
            chosen.ready.set()
        needed = len(self._idle) + len(self._busy) + len(self._small) + len(self._large)
        self._wanted = max(self._wanted, min(self.size, needed))
        self._lock.notify_all()

    def _next(self) -> _Waiting | None:
        has_room = sum(self._busy.values()) < self.size - 1
        if self._large and has_room:
            longest = min(one.rank for one in self._large)
            if not self._small or longest < self._small.first().rank:
                return self._large.take()
        return self._small.take() if self._small else None

    def _queue_of(self, waiting: _Waiting) -> FairQueue[_Waiting]:
        return self._large if waiting.is_large else self._small

    def _keep(self) -> None:
        """Starts processes until the pool is closed."""
        while True:
            with self._lock:
                while not self._is_closed and len(self._idle) + len(self._busy) >= self._wanted:
                    self._lock.wait()
                if self._is_closed:
                    return
            try:
                process = PoolProcess(self._module, *self._words, fds=self._fds)
            except OSError as error:
                _log.warning("cannot start %s: %s; trying again", self._module, os.strerror(error.errno or 0))
                with self._lock:
                    self._lock.wait(1.0)
                continue
            self._adopt(process)

    def _adopt(self, process: PoolProcess) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(process)
                self._dispatch()
                return
        process.kill()

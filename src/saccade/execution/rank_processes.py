"""Ranks 1 and up of an engine: rank 0 starts their processes, sends them orders, watches them and ends them."""

import os
import select
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any, NoReturn

import msgspec

from saccade.config import worker_environment
from saccade.errors import ConfigError, EngineDeadError, RankGoneError, SaccadeError
from saccade.execution.agreement import Agreement
from saccade.execution.channel import ReaderBehindError, ReaderGoneError, Sender
from saccade.execution.codec import Codec
from saccade.execution.rank_messages import Done, NotStarted, OrderOutcome, RankReady, RankReply, RankStart
from saccade.processes import describe_exit, print_error, start_python

MODULE = "saccade.execution.rank"
TICK_S = 0.25  # between checks of the ranks; an exit is noticed at once
PING_S = 5.0  # of silence before an idle rank is pinged
STUCK_S = 30.0  # after a rank failed, for the others to finish the step
ROOM_S = 300.0  # for a slow rank to make room for orders, if there is no watchdog
EXIT_S = 10.0  # for a process to exit after it closed its end, was told to leave, or was killed
VERDICT_S = 2 * EXIT_S  # for the watcher thread to find the cause of a failure
GONE_S = 3.0  # to notice that a rank is gone after an exchange with it failed
POLL_S = 0.02

OnDeath = Callable[[SaccadeError], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlan:
    """What ranks 1 to `num_ranks - 1` run."""

    num_ranks: int
    factory: str  # package.module:function, which takes a RankStart and returns a RankExecutor
    order_types: tuple[type, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)  # JSON-compatible
    devices: tuple[int, ...] = ()  # of all ranks including rank 0; by default the rank's number
    environment: Mapping[str, str] = field(default_factory=dict)  # added to this process's
    start_s: float = 1800.0  # to build executors
    answer_s: float = 120.0  # of silence before a rank counts as hung (--watchdog-timeout-s); 0 means never


class RankProcesses:
    """Processes with one executor each. Rank 0 sends every order to all of them and records what it did itself. When a
    rank exits, hangs or diverges from rank 0, all are killed, and the watcher thread calls `on_death` once with the
    reason, because the main thread may hang in a collective. Every later call raises the same reason. Only one thread
    may send and record orders. The watcher thread starts the processes, because they end with their starting thread."""

    def __init__(self, plan: RankPlan, on_death: OnDeath) -> None:
        """Returns once the processes run; `wait_ready` waits for their executors."""
        assert plan.num_ranks > 1, "one rank needs no others"
        self._plan, self._on_death = plan, on_death
        self._sender = Sender(Codec(*plan.order_types), plan.num_ranks - 1, self._on_reply)
        self._store_fd = os.memfd_create("saccade-store")
        self._agreement, self._agreement_lock = Agreement(plan.num_ranks), threading.Lock()
        self._facts: dict[int, Any] = {}
        self._last_words: dict[int, NotStarted] = {}
        self._suspicion: str | None = None
        self._error: SaccadeError | None = None
        self._has_started, self._is_dead, self._is_closing = threading.Event(), threading.Event(), threading.Event()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._started_at = self._checked_at = monotonic()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._watcher = threading.Thread(target=self._watch, name="rank watcher", daemon=True)
        self._watcher.start()
        self._has_started.wait()
        try:
            self.check()
        except SaccadeError:
            self.close()
            raise

    @property
    def store(self) -> str:
        """A file for a FileStore that all ranks share; it has no name that other processes could open. It stays open
        until this process ends: a FileStore reopens it when garbage-collected, and a reused descriptor would make it
        write to another file."""
        return f"/proc/self/fd/{self._store_fd}"

    @property
    def pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self._processes.items()}

    @property
    def _are_ready(self) -> bool:
        return len(self._facts) == len(self._processes)

    def wait_ready(self) -> tuple[Any, ...]:
        """Waits for the executors of ranks 1 and up, and returns the facts they report."""
        while not self._are_ready:
            self.check()
            self._sender.wait(POLL_S)
        self.check()
        return tuple(self._facts[rank] for rank in sorted(self._facts))

    def send(self, order: object) -> int:
        """Returns the order's number, for `record`. Waits only if a rank is far behind."""
        self.check()
        assert self._are_ready, "orders were sent before the ranks were ready"
        try:
            return self._sender.send(order, timeout_s=self._plan.answer_s or ROOM_S)
        except (ReaderGoneError, ReaderBehindError) as error:
            self._suspect(str(error))

    def record(self, number: int, outcome: OrderOutcome) -> None:
        """Records what rank 0 did with an order. Every order must be recorded, in any order."""
        self.check()
        with self._agreement_lock:
            why = self._agreement.note(0, number, outcome, monotonic())
        if why is not None:
            self._suspect(why)

    def wait(self, number: int, timeout_s: float) -> None:
        """Waits until ranks 1 and up have finished an order, or raises TimeoutError."""
        deadline = monotonic() + timeout_s
        self._sender.collect()
        while not self._sender.is_done(number):
            self.check()
            if monotonic() > deadline:
                behind = ", ".join(map(str, self._sender.behind()))
                raise TimeoutError(f"rank {behind} did not finish step {number} in {timeout_s:g} s")
            self._sender.wait(deadline - monotonic())
        self.check()

    def explain(self, error: BaseException) -> BaseException:
        """Finds out why rank 0 failed while building. Saccade's own errors stand; any other may come from the death of
        another rank, which is detected a moment later."""
        root = error.__cause__ or error
        if isinstance(root, SaccadeError) or not isinstance(root, Exception):
            return error
        self._wake()
        self._is_dead.wait(GONE_S)
        return self._error or error

    def settle(self, number: int) -> None:
        """Call after rank 0 failed in an order. Returns if all ranks failed alike, or raises which one diverged."""
        self.check()
        try:
            self.wait(number, self._stuck_s + VERDICT_S)
        except TimeoutError as error:
            self._suspect(str(error))

    def close(self) -> None:
        """Gives ranks a while to finish their orders, then kills them. May be called again."""
        self._is_closing.set()
        self._wake()
        if threading.current_thread() is self._watcher:
            return  # called from on_death: the watcher ends the ranks when that returns
        self._watcher.join()
        self._sender.close()
        if self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def check(self) -> None:
        """Raises the reason if the ranks cannot continue."""
        self._check_alive()
        if self._is_closing.is_set():
            raise EngineDeadError("the ranks were closed")
        if self._suspicion is not None:
            self._suspect(self._suspicion)

    def _suspect(self, why: str) -> NoReturn:
        """Leaves the verdict to the watcher thread: a rank that died may have caused the problem found here."""
        self._suspicion = self._suspicion or why
        self._wake()
        self._is_dead.wait(VERDICT_S)
        self._check_alive()
        raise EngineDeadError(why)

    def _check_alive(self) -> None:
        if self._error is not None:
            raise type(self._error)(str(self._error))

    def _wake(self) -> None:
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def _on_reply(self, rank: int, reply: RankReply) -> None:
        match reply:
            case RankReady(facts=facts):
                self._facts[rank] = facts
            case NotStarted():
                self._last_words[rank] = reply
                self._wake()
            case Done(sequence=sequence, outcome=outcome):
                with self._agreement_lock:
                    why = self._agreement.note(rank, sequence, outcome, monotonic())
                if why is not None:
                    self._suspicion = self._suspicion or why
                    self._wake()

    def _watch(self) -> None:
        try:
            self._start_all()
            self._has_started.set()
            while not self._is_closing.is_set():
                self._wait_for_news()
                if (error := self._find_problem(monotonic())) is not None:
                    self._die(error)
                    return
            if self._can_finish:
                self._sender.tell_to_close()
                self._wait_for_exits(EXIT_S)
        except Exception as error:  # otherwise the ranks would go unwatched
            print_error(error)
            self._die(EngineDeadError(f"the rank watcher failed: {type(error).__name__}: {error}"))
        finally:
            self._kill()
            self._has_started.set()
            self._wait_for_exits(EXIT_S)
            for process in self._processes.values():
                assert process.stdin is not None, "it is a pipe"
                process.stdin.close()

    @property
    def _can_finish(self) -> bool:
        """Whether the ranks can come to an end by themselves. A rank that is still building does not listen, and it may
        wait for rank 0, as may one in an order that rank 0 has left, because of Ctrl-C for example."""
        self._sender.collect()
        with self._agreement_lock:
            return self._are_ready and not self._agreement.is_left_by(0)

    def _start_all(self) -> None:
        try:
            for rank, end in self._sender.reader_sockets.items():
                self._processes[rank] = self._start(rank, end.fileno())
        finally:
            self._sender.release_reader_ends()

    def _start(self, rank: int, socket_fd: int) -> "subprocess.Popen[bytes]":
        plan, memory_fd, store_fd = self._plan, self._sender.memory_fd, self._store_fd
        start = RankStart(
            rank=rank,
            num_ranks=plan.num_ranks,
            device=plan.devices[rank] if plan.devices else rank,
            factory=plan.factory,
            settings=dict(plan.settings),
            parent_pid=os.getpid(),
            socket_fd=socket_fd,
            memory_fd=memory_fd,
            store_fd=store_fd,
        )
        environment = worker_environment() | dict(plan.environment)
        process = start_python(MODULE, environment=environment, fds=(socket_fd, memory_fd, store_fd))
        assert process.stdin is not None, "it is a pipe"
        with suppress(BrokenPipeError):  # it exited at once; the watcher will see that
            process.stdin.write(msgspec.json.encode(start) + b"\n")
            process.stdin.flush()
        return process

    def _wait_for_news(self) -> None:
        """Waits until a rank dies, `_wake` is called, or the next check is due. Does not read replies."""
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        for fd in self._sender.filenos():
            poll.register(fd, 0)  # hang-ups are always reported
        for fd, _ in poll.poll(TICK_S * 1000):
            if fd == self._wake_fd:
                os.eventfd_read(fd)

    def _find_problem(self, now: float) -> SaccadeError | None:
        """Why the ranks cannot continue. Looks for dead ranks first, because they cause other problems."""
        codes = self._exit_codes()
        self._sender.collect()  # after reading the exit codes: last words are sent before the exit
        for rank, words in self._last_words.items():
            kind = ConfigError if words.is_config else EngineDeadError
            return kind(f"rank {rank} failed to start: {words.error}")
        for rank in [*codes, *self._sender.gone()]:
            return RankGoneError(self._why_gone(rank))
        if not self._are_ready:
            late = min(set(self._processes) - set(self._facts))
            limit_s = self._plan.start_s
            is_late = 0 < limit_s < now - self._started_at
            return EngineDeadError(f"{self._name(late)} was not ready after {limit_s:g} s") if is_late else None
        if why := self._suspicion or self._why_stuck(now):
            return EngineDeadError(why)
        return RankGoneError(why) if (why := self._why_silent(now)) else None

    def _why_gone(self, rank: int) -> str:
        when = "" if rank in self._facts else " before it was ready"
        try:
            return f"{self._name(rank)} {describe_exit(self._processes[rank].wait(EXIT_S))}{when}"
        except subprocess.TimeoutExpired:
            return f"{self._name(rank)} has closed its end of the channel{when}"

    def _why_stuck(self, now: float) -> str | None:
        with self._agreement_lock:
            return self._agreement.stuck(now, self._stuck_s) or self._agreement.waiting(now, self._plan.answer_s)

    @property
    def _stuck_s(self) -> float:
        return min(self._plan.answer_s or STUCK_S, STUCK_S)

    def _why_silent(self, now: float) -> str | None:
        limit_s = self._plan.answer_s
        was_suspended = now - self._checked_at > limit_s / 2
        self._checked_at = now
        if not limit_s:
            return None
        if was_suspended:  # and so may the ranks have been
            self._sender.forgive(now)
        for rank in self._processes:
            if self._sender.silent_s(rank, now) > limit_s:
                return f"{self._name(rank)} has not answered for {limit_s:g} s"
        self._sender.ping(min(PING_S, limit_s / 2), now)
        return None

    def _die(self, error: SaccadeError) -> None:
        if self._error is not None:
            return
        self._error = error
        self._kill()
        try:
            self._on_death(error)
        finally:
            self._is_dead.set()

    def _name(self, rank: int) -> str:
        return f"rank {rank} of {self._plan.num_ranks}"

    def _exit_codes(self) -> dict[int, int]:
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        return {rank: code for rank, code in codes.items() if code is not None}

    def _kill(self) -> None:
        for process in self._processes.values():
            process.kill()

    def _wait_for_exits(self, timeout_s: float) -> None:
        deadline = monotonic() + timeout_s
        while len(self._exit_codes()) < len(self._processes) and monotonic() < deadline:
            sleep(POLL_S)

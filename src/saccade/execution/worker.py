"""The engine process, started by `worker_start`.

It takes commands between steps and while a step runs, and blocks on them only when idle. The parent holds the other end
of its standard input: when that closes, or the kernel reports the parent's death, the process exits. It leaves nothing
to clean up, so SIGTERM keeps its default and ends it at once. `Close` is the command for an orderly exit.
"""

import gc
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket
from time import monotonic, sleep

import torch
from llguidance import LLMatcher
from msgspec.structs import astuple

from saccade.errors import CapacityError, ConfigError, RankGoneError, RequestError, SaccadeError
from saccade.execution.build import Built, build_engine, limit_threads
from saccade.execution.compilers import CompileProcesses, start_compiling
from saccade.execution.rank_processes import OnDeath
from saccade.execution.spare_compilers import SpareCompilers
from saccade.execution.watch import Watch
from saccade.inputs.processor import Processor
from saccade.kernels.dispatch import device_named
from saccade.kernels.packages import import_packages
from saccade.processes import EXIT_FAILED, EXIT_ORPHANED, print_error
from saccade.scheduling.engine import Engine
from saccade.scheduling.matcher import refusal
from saccade.scheduling.request import Request
from saccade.wire import messages
from saccade.wire.engine_metrics import JobStats
from saccade.wire.link import Link, OtherEndGoneError
from saccade.wire.update import Finish, FinishReason, Update

LINGER_S = 2.0  # to deliver the last messages
MAX_COMMANDS = 128  # per step, so that a burst of requests does not stall running ones
MAX_POLLED = 4  # per check on a running step
COMPILE_POLL_S = 0.002
BURST_GAP_S = 0.004  # requests that arrive closer together form a burst, and share a step
FIRST_COMMAND_S = 0.2  # to wait for the first command before importing packages
IDLE_S = 0.5  # without a command before idle work, which can delay a request by up to about 50 ms
ABORTED = Finish(FinishReason.ABORT)

Tell = Callable[[messages.EngineReply], None]


@dataclass(frozen=True, slots=True)
class _Member:
    """The command, and the index of its output, that an engine request belongs to."""

    serial: int
    index: int
    request: Request


@dataclass(frozen=True, slots=True)
class _Compiling:
    command: messages.Add
    frames: messages.Buffers
    grammar: Future[LLMatcher]
    since: float = field(default_factory=monotonic)


class Worker:
    """Steps an engine and reports for it. Every `Add` gets a refusal, or news that finish each output exactly once."""

    def __init__(self, engine: Engine, link: Link, tell: Tell) -> None:
        self._engine, self._link, self._tell = engine, link, tell
        self._members: dict[str, _Member] = {}
        self._ids: dict[tuple[int, int], str] = {}
        self._compiling: dict[int, _Compiling] = {}
        self._news: list[messages.News] = []
        self._watch = Watch(engine)
        self._is_open = True
        self._is_checked = True  # scheduler.check() has run since the last step
        self._last_add: float | None = None  # since the last plan

    def run(self) -> None:
        while self._is_open:
            self._take_commands()
            self._add_compiled()
            self._watch.check()
            self._last_add = None
            if self._engine.has_work:
                self._is_checked = False
                self._note(self._engine.step(self._poll_commands))
            if self._news:
                self._tell(messages.Updates(self._news))
                self._news = []

    def _poll_commands(self) -> bool:
        """Takes commands while a step runs. Returns whether to launch the requests that arrived right behind it. Waits
        for the end of a burst, because a step for its first request alone would delay the others."""
        self._take_waiting(most=MAX_POLLED)
        self._add_compiled()
        return self._last_add is not None and monotonic() - self._last_add >= BURST_GAP_S

    def _take_commands(self) -> None:
        is_idle = not self._engine.has_work and not self._compiling
        if self._compiling and not self._engine.has_work:
            self._link.wait(COMPILE_POLL_S)
        if is_idle and self._engine.idle.can_check and not self._has_command():
            self._check_shadow()
            return
        has_idle_work = not self._is_checked or self._engine.idle.can_capture
        if is_idle and has_idle_work and not self._link.wait(IDLE_S):
            self._use_idle_time()
        elif not is_idle or self._link.wait(self._watch.seconds_left()):
            self._take_waiting()

    def _take_waiting(self, most: int = MAX_COMMANDS) -> None:
        """Takes the commands that are there."""
        for _ in range(most):
            if (frames := self._link.receive()) is None:
                return
            self._obey(frames)

    def _use_idle_time(self) -> None:
        if not self._is_checked:
            self._engine.scheduler.check()
            self._is_checked = True
        elif (error := self._engine.idle.capture_next()) is not None:
            print_error(error)

    def _has_command(self) -> bool:
        return self._link.wait(0)

    def _check_shadow(self) -> None:
        """Checks one recorded replay, and stops when a command arrives."""
        found = self._engine.idle.check(self._has_command)
        if isinstance(found, Exception):
            print_error(found)
        elif found is not None:
            self._tell(messages.Degraded(found.reason, str(found)))

    def _obey(self, frames: messages.Buffers) -> None:
        match messages.decode_command(frames[0]):
            case messages.Add() as command:
                self._take(command, frames[1:])
            case messages.Abort(serial=serial):
                self._forget(serial)
                self._note(self._engine.abort(str(serial)))
            case messages.Stop(serial=serial, index=index, stop=stop):
                if (serial, index) in self._ids:
                    self._note(self._engine.stop(self._ids[serial, index], stop))
            case messages.AskStats(serial=serial, passes_since=since):
                self._tell(self._stats(serial, since))
            case messages.Flush(serial=serial):
                self._tell(messages.Flushed(serial, not self._compiling and self._engine.scheduler.forget_cached()))
            case (
                messages.BeginTrace() | messages.EndTrace() | messages.StartProfile() | messages.StopProfile() as asked
            ):
                self._tell(self._watch.answer(asked))
            case messages.Close():
                self._close()
            case messages.StartEngine():
                raise ConfigError("the engine was told to start twice")

    def _stats(self, serial: int, since: int | None) -> messages.StatsReply:
        wait_s = max((monotonic() - waiting.since for waiting in self._compiling.values()), default=0.0)
        figures, phases = self._engine.scheduler.stats(), self._engine.phase_snapshots()
        return messages.StatsReply(
            serial,
            figures,
            phases,
            gpu_bytes_in_use(),
            gpu_bytes_reserved(),
            wait_s,
            JobStats() if self._engine.grammars is None else self._engine.grammars.jobs,
            self._engine.step_tokens,
            [] if since is None else self._engine.passes.records(since),
        )

    def _take(self, command: messages.Add, frames: messages.Buffers) -> None:
        """Adds a request, after compiling its grammar if it has one. Others may overtake it meanwhile."""
        grammar, compiler = command.params.grammar, self._engine.grammars
        if grammar is None or compiler is None:  # without a compiler, a grammar is refused
            self._add(command, frames)
        else:
            compiled = compiler.compile(grammar, command.turn.tenant)
            self._compiling[command.serial] = _Compiling(command, frames, compiled)

    def _add_compiled(self) -> None:
        for serial, waiting in list(self._compiling.items()):
            deadline = waiting.command.deadline
            if deadline is not None and deadline <= monotonic():
                self._forget(
                    serial, Finish(FinishReason.DEADLINE, "the deadline passed before the grammar was compiled")
                )
            elif waiting.grammar.done():
                del self._compiling[serial]
                if (error := refusal(waiting.grammar)) is not None:
                    self._tell(_refusal(serial, error))
                else:
                    self._add(waiting.command, waiting.frames, waiting.grammar.result())

    def _forget(self, serial: int, ended: Finish = ABORTED) -> None:
        """Ends a request that is still waiting for its grammar."""
        waiting = self._compiling.pop(serial, None)
        if waiting is not None:
            if all(other.grammar is not waiting.grammar for other in self._compiling.values()):
                grammar, compiler = waiting.command.params.grammar, self._engine.grammars
                assert grammar is not None and compiler is not None, "it waits for one"
                compiler.forget(grammar, waiting.grammar)
            many = range(waiting.command.params.n)
            self._news += [messages.News(str(serial), finish=ended, serial=serial, index=index) for index in many]

    def _add(self, command: messages.Add, frames: messages.Buffers, compiled: LLMatcher | None = None) -> None:
        try:
            ids = self._engine.add(
                str(command.serial),
                messages.unpack_prompt(command.prompt, frames),
                command.params,
                deadline=command.deadline,
                cache_salt=command.cache_salt,
                turn=command.turn,
                compiled=compiled,
            )
        except Exception as error:  # a bad request must not affect others
            self._engine.abort(str(command.serial))
            self._tell(_refusal(command.serial, error))
            return
        self._last_add = monotonic()
        for index, member_id in enumerate(ids):
            self._members[member_id] = _Member(command.serial, index, self._engine.scheduler.live[member_id])
            self._ids[command.serial, index] = member_id

    def _note(self, updates: Iterable[Update]) -> None:
        for update in updates:
            member = self._members[update.request_id]
            cached = member.request.num_cached_tokens
            self._news.append(
                messages.News(*astuple(update), serial=member.serial, index=member.index, num_cached_tokens=cached)
            )
            if update.finish is not None:
                del self._members[update.request_id], self._ids[member.serial, member.index]

    def _close(self) -> None:
        for serial in list(self._compiling):
            self._forget(serial)
        for serial in {member.serial for member in self._members.values()}:
            self._note(self._engine.abort(str(serial)))
        self._is_open = False


def main(end: socket, spares: SpareCompilers) -> int:
    link = Link(end)

    def tell(reply: messages.EngineReply) -> None:
        link.send([messages.encode(reply)])

    def die(error: SaccadeError) -> None:
        """For the thread that watches other ranks: if one dies, the main thread may hang in a collective."""
        tell(_failure(error))
        sleep(LINGER_S)  # the receiver ends this process
        os._exit(EXIT_FAILED)

    try:
        return _serve(link, tell, die, spares)
    except OtherEndGoneError:
        return EXIT_ORPHANED
    finally:
        spares.close()
        gc.unfreeze()
        link.flush(LINGER_S)
        link.close()


def _serve(link: Link, tell: Tell, die: OnDeath, spares: SpareCompilers) -> int:
    built: Built | None = None
    compiling: CompileProcesses | None = None
    try:
        if not link.wait(FIRST_COMMAND_S):
            import_packages()  # while the parent looks for the model
        while (frames := link.receive()) is None:
            link.wait(None)
        start = messages.decode_command(frames[0])
        assert isinstance(start, messages.StartEngine), f"the first command is {start}"
        device = device_named(start.settings.device)
        if device.type == "cuda":
            tell(messages.Stage("importing packages"))
        compiling = start_compiling(start, device, spares)
        with ThreadPoolExecutor(1) as reader:  # reading a tokenizer takes half a second and releases the GIL
            processor = reader.submit(Processor.from_folder, Path(start.folder))
            import_packages()
        gc.freeze()  # packages have hundreds of thousands of objects, which collections before captures need not scan
        gc.enable()  # `worker_start` turned it off
        built = _build(start, processor.result(), tell, die, compiling)
        if compiling is not None:
            compiling.note_started()
        engine = built.engine
        gc.collect()
        gc.freeze()  # permanent objects need not be scanned while requests run
        pool = engine.scheduler.resources.pool
        limits = engine.scheduler.settings
        facts = gpu_bytes_in_use(), built.tensor_parallel, engine.composer.has_head
        tell(messages.Ready(limits, pool.num_tokens, pool.block_size, *facts))
        Worker(engine, link, tell).run()
        tell(messages.Closed())
    except OtherEndGoneError:
        raise
    except SaccadeError as error:
        tell(_failure(error))
        return EXIT_FAILED
    except Exception as error:
        print_error(error)
        tell(messages.Failure(f"{type(error).__name__}: {error}"))
        return EXIT_FAILED
    finally:
        if compiling is not None:
            compiling.close()
        if built is not None:
            built.close()
    return 0


def _build(
    start: messages.StartEngine, processor: Processor, tell: Tell, die: OnDeath, compiling: CompileProcesses | None
) -> Built:
    folder = Path(start.folder)
    limit_threads(folder)
    return build_engine(
        folder,
        start.settings,
        start.limits,
        processor=processor,
        report=tell,
        on_death=die,
        tries_grammars=True,
        compiling=compiling,
    )


def gpu_bytes_in_use() -> int:
    """Bytes in use on the device by all processes, including what allocators, graphs and libraries hold."""
    if not torch.cuda.is_initialized():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def gpu_bytes_reserved() -> int:
    """Bytes that torch's allocator holds in this process, including graph pools; other processes do not affect it."""
    return torch.cuda.memory_reserved() if torch.cuda.is_initialized() else 0


def _failure(error: SaccadeError) -> messages.Failure:
    return messages.Failure(
        str(error), is_config=isinstance(error, ConfigError), is_rank_gone=isinstance(error, RankGoneError)
    )


def _refusal(serial: int, error: Exception) -> messages.Refused:
    if isinstance(error, RequestError):
        return messages.Refused(serial, "request", str(error), error.param, error.code)
    if isinstance(error, CapacityError):
        return messages.Refused(serial, "capacity", str(error), retry_after_s=error.retry_after_s)
    print_error(error)
    return messages.Refused(serial, "internal", f"the engine could not accept the request: {type(error).__name__}")

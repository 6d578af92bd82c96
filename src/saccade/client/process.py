"""The engine in its own process, for asyncio. The worker computes while this side turns tokens into text. When the
worker dies, every pending request ends at once with an EngineDeadError."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from itertools import count
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from saccade.client.child import Child
from saccade.client.liveness import Liveness
from saccade.client.served import EngineReport
from saccade.client.spare import Spare
from saccade.client.stream import Delta, RequestStream
from saccade.errors import CapacityError, ConfigError, EngineDeadError, RankGoneError, RequestError, SaccadeError
from saccade.inputs.placeholders import Prompt
from saccade.inputs.processor import Processor
from saccade.models.folder import find_folder
from saccade.processes import describe_exit
from saccade.wire import messages
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.trace_records import MAX_REQUESTS, EngineTrace
from saccade.wire.turn import USUAL, Terms

CLOSE_S = 5.0  # for a worker to exit when told to
ASK_S = 5.0  # between two checks that the worker still answers
LAST_WORDS_S = 0.5  # to read what a worker sent before it ended

_log = logging.getLogger(__name__)


class AsyncEngine:
    """An engine in its own process. Created by `start`, ended by `aclose`, used in one event loop. Every `generate`
    ends: with the last delta of each output, or with an error."""

    is_replicated = False

    def __init__(self, child: Child, report: messages.OnStage) -> None:
        self._child, self._report = child, report
        self._serials = count()
        self._streams: dict[int, RequestStream] = {}
        self._by_id: dict[str, RequestStream] = {}
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._ready: asyncio.Future[messages.Ready] = asyncio.get_running_loop().create_future()
        self._dead: asyncio.Future[SaccadeError] = asyncio.get_running_loop().create_future()
        self._is_closing = False
        self._closed: asyncio.Task[None] | None = None
        self._tasks = [asyncio.create_task(self._watch())]
        self._processor: Processor | None = None
        self._liveness = Liveness()
        self._traced_ids: dict[int, str] | None = None  # while a trace is recorded
        child.listen(self._hear, self._fail_to_hear)

    @classmethod
    async def start(
        cls,
        model: str | Path,
        settings: EngineSettings | None = None,
        limits: SchedulerSettings | None = None,
        *,
        processor: Processor | None = None,
        report: messages.OnStage = lambda stage: None,
        spare: Spare | None = None,
    ) -> "AsyncEngine":
        """Returns when the engine is ready. `report` receives every stage. Without a `processor`, the folder's own is
        created. A `spare` worker is used if given. Raises the worker's ConfigError for a bad model or setting."""
        chosen = settings or EngineSettings()
        folder = await asyncio.to_thread(find_folder, model, revision=chosen.revision, download_dir=chosen.download_dir)
        engine = cls(Child(spare), report)
        try:
            start = messages.StartEngine(str(folder.resolve()), chosen, limits or SchedulerSettings())
            engine._send(start)
            engine._processor = processor or await asyncio.to_thread(
                Processor.from_folder, folder, chat_template=chosen.chat_template
            )
            await _wait_first(engine._ready, engine._dead)
            if engine._dead.done():
                raise engine._dead.result()
            engine._tasks.append(asyncio.create_task(engine._ask_regularly(start.settings.watchdog_timeout_s)))
        except BaseException:
            engine._child.process.kill()
            await engine.aclose()
            raise
        return engine

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    @property
    def processor(self) -> Processor:
        assert self._processor is not None, "the engine was not started"
        return self._processor

    @property
    def ready(self) -> messages.Ready:
        return self._ready.result()

    @property
    def pid(self) -> int:
        return self._child.process.pid

    @property
    def is_alive(self) -> bool:
        return self._ready.done() and not self._dead.done() and not self._is_closing

    @property
    def death(self) -> str:
        """Which rank's loss killed the engine; empty if it is alive or died of something else."""
        error = self._dead.result() if self._dead.done() else None
        return str(error) if isinstance(error, RankGoneError) else ""

    @property
    def degraded(self) -> list[str]:
        """What is wrong with an engine that keeps running."""
        return self._liveness.troubles(has_work=bool(self._streams))

    async def wait_dead(self) -> str:
        """Returns the reason once the engine is gone."""
        return str(await asyncio.shield(self._dead))

    async def generate(
        self, request_id: str, prompt: Prompt, params: SamplingParams, terms: Terms = USUAL
    ) -> AsyncGenerator[Delta, None]:
        """The outputs of a request, piece by piece. Closing the generator aborts the request. A refused request raises
        the engine's RequestError or CapacityError; one that fails while running ends with finish reason "error"."""
        stream = self._open(request_id, prompt, params)
        try:
            head, arrays = messages.pack_prompt(prompt)
            self._send(messages.Add(stream.serial, head, params, terms.turn, terms.deadline, terms.cache_salt), arrays)
            del prompt, head, arrays  # the worker has the pixels now
            while not stream.is_done:
                for delta, stop in stream.read(await stream.receive()):
                    if stop is not None:
                        self._send(messages.Stop(stream.serial, delta.index, stop))
                    yield delta
        finally:
            self._leave(stream)

    def abort(self, request_id: str) -> None:
        """End a request; its unfinished outputs get finish reason "abort". Unknown ids are ignored."""
        stream = self._by_id.get(request_id)
        if stream is not None:
            self._send(messages.Abort(stream.serial))

    async def stats(self, passes_since: int | None = None) -> messages.StatsReply:
        """The scheduler's numbers, each phase's counters and graphs by name, and the device memory in use; with
        `passes_since`, also the newest passes with a greater number."""
        stats: messages.StatsReply = await self._ask(messages.AskStats(next(self._serials), passes_since))
        return stats

    async def reports(self, passes_since: int | None = None) -> dict[str, EngineReport]:
        return {"0": EngineReport(self.ready, await self.stats(passes_since))}

    async def flush_cache(self) -> bool:
        """Empty the prompt and image caches. Returns False without doing anything while requests run or wait."""
        flushed: messages.Flushed = await self._ask(messages.Flush(next(self._serials)))
        return flushed.is_done

    async def begin_trace(self, limit_s: float) -> None:
        """Record what the engine does until `end_trace`, for at most `limit_s`."""
        self._traced_ids = {serial: stream.request_id for serial, stream in self._streams.items()}
        await self._ask(messages.BeginTrace(next(self._serials), limit_s))

    async def end_trace(self) -> EngineTrace | None:
        """The recorded trace, with the request ids of `generate`; None if nothing was recorded."""
        traced: messages.Traced = await self._ask(messages.EndTrace(next(self._serials)))
        names, self._traced_ids = self._traced_ids or {}, None
        if traced.trace is None:
            return None
        requests = []
        for one in traced.trace.requests:
            serial, *index = one.request_id.split(":")
            requests.append(replace(one, request_id=":".join([names.get(int(serial), serial), *index])))
        return replace(traced.trace, requests=requests)

    async def start_profile(self, folder: str, limit_s: float) -> None:
        """Profile the engine's process with torch for at most `limit_s`. Raises a RequestError if that is
        impossible."""
        profiled: messages.Profiled = await self._ask(messages.StartProfile(next(self._serials), folder, limit_s))
        if profiled.problem:
            raise RequestError(profiled.problem, code="profile_refused")

    async def stop_profile(self) -> str:
        """The file that the profile was written to. Raises a RequestError if there is none."""
        profiled: messages.Profiled = await self._ask(messages.StopProfile(next(self._serials)))
        if profiled.problem:
            raise RequestError(profiled.problem, code="profile_refused")
        return profiled.file

    async def _ask(self, question: messages.EngineQuestion) -> Any:
        """Sends a question and waits for its answer. The worker answers between two steps or while a step runs."""
        self._check_alive()
        serial = question.serial
        self._asked[serial] = asyncio.get_running_loop().create_future()
        try:
            self._send(question)
            return await self._asked[serial]
        finally:
            del self._asked[serial]

    async def aclose(self) -> None:
        """Refuse new requests, abort the running ones, end the process."""
        self._is_closing = True
        if self._closed is None:
            self._closed = asyncio.create_task(self._close())
        await asyncio.shield(self._closed)

    async def _close(self) -> None:
        try:
            self._send(messages.Close())
            await _wait_first(self._dead, timeout_s=CLOSE_S)
        finally:
            self._die(EngineDeadError("the engine was closed"))
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._child.close(CLOSE_S)

    def _open(self, request_id: str, prompt: Prompt, params: SamplingParams) -> RequestStream:
        self._check_alive()
        if request_id in self._by_id:
            raise RequestError(f"request {request_id!r} is still running; ids must be unique", param="request_id")
        stream = RequestStream(next(self._serials), request_id, prompt, params, self.processor.tokenizer)
        self._by_id[request_id] = self._streams[stream.serial] = stream
        if self._traced_ids is not None and len(self._traced_ids) < MAX_REQUESTS:
            self._traced_ids[stream.serial] = request_id
        return stream

    def _leave(self, stream: RequestStream) -> None:
        del self._by_id[stream.request_id], self._streams[stream.serial]
        if not stream.is_done and stream.error is None:
            self._send(messages.Abort(stream.serial))

    def _send(self, command: messages.EngineCommand, arrays: messages.PromptArrays = ()) -> None:
        if not self._dead.done():
            self._child.send(command, arrays)

    def _check_alive(self) -> None:
        if self._dead.done():
            raise _dead_error(self._dead.result())
        if self._is_closing:
            raise EngineDeadError("the engine is closing and accepts no more requests")

    def _fail_to_hear(self, error: Exception) -> None:
        self._die(EngineDeadError(f"the engine's messages cannot be read: {type(error).__name__}: {error}"))

    def _hear(self, reply: messages.EngineReply) -> None:
        self._liveness.note_message()
        match reply:
            case messages.Updates(news=news):
                for item in news:
                    if (stream := self._streams.get(item.serial)) is not None:
                        stream.put(item)
            case messages.Refused(serial=serial):
                if serial in self._streams:
                    self._streams[serial].fail(_exception(reply))
            case messages.StatsReply() | messages.Flushed() | messages.Traced() | messages.Profiled():
                if isinstance(reply, messages.StatsReply):
                    self._liveness.note_compiling(reply.compile_wait_s)
                if reply.serial in self._asked and not self._asked[reply.serial].done():
                    self._asked[reply.serial].set_result(reply)
            case _:
                self._hear_of_engine(reply)

    def _hear_of_engine(
        self, reply: messages.Stage | messages.Ready | messages.Degraded | messages.Failure | messages.Closed
    ) -> None:
        match reply:
            case messages.Stage():
                self._report(reply)
            case messages.Ready():
                self._ready.set_result(reply)
            case messages.Degraded(reason=reason, note=note):
                _log.error("%s", note)
                self._liveness.faults.append(reason)
            case messages.Closed():
                self._die(EngineDeadError("the engine was closed"))
            case messages.Failure():
                if reply.is_config and not self._ready.done():
                    self._die(ConfigError(reply.message))
                    return
                kind = RankGoneError if reply.is_rank_gone else EngineDeadError
                self._die(kind(_died(reply.message)))

    async def _watch(self) -> None:
        """Waits for the process to end. Its last messages may still be in flight then."""
        code = await self._child.wait()
        if code >= 0:
            await _wait_first(self._dead, timeout_s=LAST_WORDS_S)
        self._die(EngineDeadError(_died(f"its process {describe_exit(code)}")))

    async def _ask_regularly(self, limit_s: float) -> None:
        """Asks the worker for its stats from time to time. One that does not answer hangs, which nothing else shows."""
        while not self._dead.done():
            await asyncio.sleep(min(ASK_S, limit_s or ASK_S))
            try:
                await asyncio.wait_for(self.stats(), limit_s or None)
            except EngineDeadError:
                return
            except TimeoutError:
                why = f"it has not answered for {limit_s:g} seconds (--watchdog-timeout-s)"
                self._die(EngineDeadError(_died(why)))

    def _die(self, error: SaccadeError) -> None:
        if self._dead.done():
            return
        self._dead.set_result(error)
        for stream in self._streams.values():
            stream.fail(_dead_error(error))
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(_dead_error(error))
        if not self._is_closing:
            self._child.process.kill()


async def _wait_first(*futures: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


def _exception(refused: messages.Refused) -> SaccadeError:
    if refused.kind == "request":
        return RequestError(refused.message, param=refused.param, code=refused.code)
    if refused.kind == "capacity":
        return CapacityError(refused.message, retry_after_s=refused.retry_after_s)
    return SaccadeError(refused.message)


def _dead_error(error: SaccadeError) -> EngineDeadError:
    """A new exception for each caller."""
    return (RankGoneError if isinstance(error, RankGoneError) else EngineDeadError)(str(error))


def _died(why: str) -> str:
    return f"the engine died: {why}; its requests are lost, and it must be restarted"

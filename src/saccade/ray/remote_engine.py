"""The replicas of a Ray cluster as one engine, for the front end."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from contextvars import Context
from time import monotonic
from typing import Any
from uuid import uuid4

from msgspec.structs import replace as replace_struct
from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import RayServeException

from saccade.client.replicas import sum_of
from saccade.client.served import EngineReport
from saccade.client.stream import Delta
from saccade.errors import CapacityError, EngineDeadError, SaccadeError
from saccade.inputs.placeholders import Prompt
from saccade.inputs.processor import Processor
from saccade.ray.ray_messages import Question, Route, decode_reply, encode, error_of, flat
from saccade.routing import affinity_key, request_tokens
from saccade.wire import messages
from saccade.wire.messages import Ready, StatsReply
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.turn import USUAL, Terms

MAX_TRIES = 2
RETRY_AFTER_S = 5.0
POLL_S, MAX_POLLS = 0.5, 7200


class RemoteEngine:
    """Created by `connect`, which waits for a replica with the same plan: during an update, replicas with other limits
    still run. `handle` is Ray Serve's handle of the engine deployment."""

    is_replicated = True
    is_alive = True  # replicas come and go; requests wait while there is none
    death = ""

    def __init__(self, handle: Any, processor: Processor, ready: Ready) -> None:
        self._handle, self.processor, self.ready = handle, processor, ready
        self._prefix = uuid4().hex  # makes request ids unique across front ends
        self._streams = handle.options(stream=True)
        self._reasons: list[str] = []
        self._tasks: set[asyncio.Future[Any]] = set()

    @classmethod
    async def connect(cls, handle: Any, processor: Processor, plan: bytes, most_replicas: int) -> "RemoteEngine":
        answers = [await handle.ready.remote(plan)]  # waits for any replica
        for _ in range(MAX_POLLS):
            for said in answers:
                if said is not None:
                    found = messages.decode_reply(said)
                    assert isinstance(found, Ready), f"a replica said {found}"
                    return cls(handle, processor, sum_of([found] * most_replicas))
            await asyncio.sleep(POLL_S)
            answers = await _all(handle, "ready", plan)
        raise EngineDeadError("no replica has the settings of this front end")

    @property
    def degraded(self) -> list[str]:
        """What was wrong when the replicas last reported."""
        return self._reasons

    async def wait_dead(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def generate(
        self, request_id: str, prompt: Prompt, params: SamplingParams, terms: Terms = USUAL
    ) -> AsyncGenerator[Delta, None]:
        """Like `AsyncEngine.generate`. If the replica is lost before the first delta, the request moves to another one,
        once. Closing the generator cancels the call and so aborts the request."""
        route = Route(affinity_key(prompt, terms.cache_salt), request_tokens(len(prompt), params), self._prefix)
        head, arrays = messages.pack_prompt(prompt)
        arrays, is_continued = flat(arrays), prompt.is_continued
        del prompt
        for number in range(MAX_TRIES):
            seconds = None if terms.deadline is None else terms.deadline - monotonic()
            question = Question(f"{self._prefix}-{request_id}", head, params, terms, seconds, is_continued)
            # In a new context: within one HTTP request Ray Serve would give all calls the same id, and lose some.
            call = Context().run(self._streams.generate.remote, encode(question), arrays, route=tuple(route))
            has_begun, is_over = False, False
            try:
                async for said in _within(call, seconds):
                    reply = decode_reply(said)
                    if reply.ended is not None:
                        is_over, route = True, route._replace(avoid=(reply.ended.replica,))
                        raise error_of(reply.ended)
                    assert reply.delta is not None, "a reply has a delta or an end"
                    has_begun, arrays = True, []
                    yield replace_struct(reply.delta, request_id=request_id)
                is_over = True
                return
            except (EngineDeadError, RayError, RayServeException) as error:
                is_over = is_over or isinstance(error, RayActorError)
                if has_begun or number + 1 == MAX_TRIES or not _is_lost(error):
                    raise _translated(error) from error
            finally:
                if not is_over:
                    with suppress(Exception):
                        call.cancel()

    def abort(self, request_id: str) -> None:
        """Tells all replicas, as only the router knows which one has the request."""
        task = asyncio.ensure_future(_all(self._handle, "abort", f"{self._prefix}-{request_id}"))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def reports(self, passes_since: int | None = None) -> dict[str, EngineReport]:
        found = {}
        reasons = []
        for name, ready, stats, wrong in await _all(self._handle, "report", passes_since):
            facts, numbers = messages.decode_reply(ready), messages.decode_reply(stats)
            assert isinstance(facts, Ready) and isinstance(numbers, StatsReply)
            found[name] = EngineReport(facts, numbers)
            reasons += [f"replica {name}: {reason}" for reason in wrong]
        self._reasons = reasons
        if not found:
            raise EngineDeadError("no replica answers")
        return dict(sorted(found.items()))

    async def flush_cache(self) -> bool:
        return all(await _all(self._handle, "flush_cache"))

    async def aclose(self) -> None:
        """Does nothing: Ray Serve ends the replicas."""


async def _all(handle: Any, method: str, *args: Any) -> list[Any]:
    """The answers of all replicas, without those that are lost."""
    try:
        found = await handle.broadcast(method, *args).results_async(return_exceptions=True)
    except (RayError, RayServeException):
        return []
    return [answer for answer in found if not isinstance(answer, BaseException)]


async def _within(call: Any, seconds: float | None) -> AsyncGenerator[bytes, None]:
    """The items of a call. Raises TimeoutError if the first is late; from then on the engine enforces the deadline."""
    items = aiter(call)
    try:
        yield await asyncio.wait_for(anext(items), seconds)
        async for item in items:
            yield item
    except StopAsyncIteration:
        return


def _is_lost(error: Exception) -> bool:
    """Whether a replica is gone, as opposed to a problem with the request."""
    return not isinstance(error, RayTaskError | TaskCancelledError)


def _translated(error: Exception) -> SaccadeError:
    if isinstance(error, SaccadeError):
        return error
    if isinstance(error, RayServeException):  # no replicas, or too many requests
        return CapacityError("the replicas accept no requests at the moment", retry_after_s=RETRY_AFTER_S)
    if isinstance(error, RayTaskError | TaskCancelledError):
        return SaccadeError(f"a replica failed: {type(error).__name__}")
    return EngineDeadError("the engine died: its replica is gone; its requests are lost")

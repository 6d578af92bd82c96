"""Operators' routes that record what the engine does: /trace, /start_profile, /stop_profile."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from starlette.requests import Request
from starlette.responses import Response

from saccade.client.served import WatchedEngine
from saccade.errors import RequestError
from saccade.server.figures.trace_events import trace_document
from saccade.server.http.json_body import json_reply
from saccade.server.http_errors import HttpError
from saccade.server.service import Service
from saccade.wire.trace_records import MAX_TRACE_S

GRACE_S = 30.0  # for fetching a trace that has ended
ANSWER_S = 60.0  # writing a profile takes long


class WatchRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._is_tracing = False

    async def trace(self, request: Request) -> Response:
        """Records what the engine does for a few seconds. One trace at a time."""
        seconds = _seconds(request.query_params.get("seconds", "5"))
        engine, requests = self._one(), self._service.requests
        with self._alone():
            async with answered():
                await engine.begin_trace(seconds + GRACE_S)
            with requests.recording():
                await asyncio.sleep(seconds)
                async with answered():
                    found = await engine.end_trace()
                prepared = requests.known()
        if found is None:
            raise HttpError(503, "the engine recorded nothing; try again", code="busy", retry_after_s=1.0)
        return await asyncio.to_thread(lambda: json_reply(trace_document(found, prepared)))

    async def start_profile(self, request: Request) -> Response:
        settings = self._service.settings
        if not settings.profile_folder:
            raise HttpError(400, "profiles need a folder; start the server with --profile-folder", code="no_folder")
        async with answered():
            await self._one().start_profile(settings.profile_folder, settings.profile_max_s)
        told = {"status": "started", "folder": settings.profile_folder, "ends_after_s": settings.profile_max_s}
        return json_reply(told)

    async def stop_profile(self, request: Request) -> Response:
        async with answered():
            file = await self._one().stop_profile()
        return json_reply({"status": "stopped", "file": file})

    def _one(self) -> WatchedEngine:
        engine = self._service.engine
        if not isinstance(engine, WatchedEngine):
            text = "traces and profiles need a server with a single engine; this one has several"
            raise HttpError(400, text, code="several_engines")
        return engine

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if self._is_tracing:
            raise HttpError(409, "another trace is being recorded; try again when it has ended", code="busy")
        self._is_tracing = True
        try:
            yield
        finally:
            self._is_tracing = False


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TRACE_S:
        shown = text[:40]
        raise RequestError(f"seconds is {shown!r}; allowed are numbers up to {MAX_TRACE_S:g}", param="seconds")
    return seconds


@asynccontextmanager
async def answered(limit_s: float = ANSWER_S) -> AsyncIterator[None]:
    """A time limit: the engine answers between two steps, or when it has written a profile."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise HttpError(503, "the engine is busy; try again", code="busy", retry_after_s=5.0) from None

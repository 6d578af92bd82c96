"""Server-sent events: `data:` lines, comments while nothing happens, and an end in any case."""

import asyncio
from collections.abc import AsyncGenerator
from time import monotonic

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from saccade.server.errors import ClientGoneError, to_http
from saccade.server.exchange import Exchange

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


async def event_stream(
    exchange: Exchange, chunks: AsyncGenerator[bytes, None], ping_s: float, headers: dict[str, str] | None = None
) -> "EventStream":
    """A reply of chunks. What fails before the first of them is raised, so that it gets a status of its own; a first
    chunk that takes long is not waited for."""
    first = asyncio.ensure_future(_first(chunks))
    exchange.exits.push_async_callback(_end, first, chunks)
    await asyncio.wait({first}, timeout=ping_s or None)
    if first.done():
        first.result()
    return EventStream(exchange, first, chunks, ping_s, headers)


class EventStream(Response):
    def __init__(
        self,
        exchange: Exchange,
        first: "asyncio.Future[bytes]",
        chunks: AsyncGenerator[bytes, None],
        ping_s: float,
        headers: dict[str, str] | None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.media_type = "text/event-stream"
        self.init_headers({**_HEADERS, **(headers or {})})
        del self.headers["content-length"]
        self._exchange, self._first, self._chunks, self._ping_s = exchange, first, chunks, ping_s
        self._last = monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        pings = asyncio.create_task(self._ping(send)) if self._ping_s else None
        try:
            await self._send_all(send)
        finally:
            if pings is not None:
                pings.cancel()
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    async def _send_all(self, send: Send) -> None:
        try:
            await self._send_chunk(send, await self._first)
            async for chunk in self._chunks:
                await self._send_chunk(send, chunk)
        except ClientGoneError:
            raise
        except Exception as error:
            found = to_http(error, self._exchange.id)
            await self._send_chunk(send, b"data: " + orjson.dumps(found.envelope()) + b"\n\n")

    async def _send_chunk(self, send: Send, chunk: bytes) -> None:
        self._last = monotonic()
        await send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def _ping(self, send: Send) -> None:
        while True:
            wait = self._last + self._ping_s - monotonic()
            if wait <= 0:
                await self._send_chunk(send, PING)
                wait = self._ping_s
            await asyncio.sleep(wait)


async def _first(chunks: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(chunks)


async def _end(first: "asyncio.Future[bytes]", chunks: AsyncGenerator[bytes, None]) -> None:
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await chunks.aclose()

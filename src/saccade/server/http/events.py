"""Server-sent events: `data:` lines, pings while idle, and always an end."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from time import monotonic

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from saccade.server.http.exchange import HttpExchange
from saccade.server.http_errors import ClientGoneError, HttpError, explain

TICK_S = 1.0
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def _plain_error(error: HttpError) -> bytes:
    return b"data: " + orjson.dumps(error.envelope()) + b"\n\n"


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """What a stream sends besides its chunks: after silence, at the end, and when something fails."""

    ping: bytes = b": ping\n\n"
    done: bytes = b"data: [DONE]\n\n"
    failure: Callable[[HttpError], bytes] = _plain_error


CHUNKS = StreamFormat()


def named_event(name: str, data: object) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"


async def event_stream(
    exchange: HttpExchange, chunks: AsyncGenerator[bytes, None], *, ping_s: float, format: StreamFormat = CHUNKS
) -> "EventStream":
    """A streamed reply. Errors before the first chunk are raised, so that they get their own status. If there is no
    chunk after `ping_s`, the reply starts without one."""
    first = asyncio.ensure_future(anext(chunks))
    exchange.exits.push_async_callback(_end, first, chunks)
    await asyncio.wait({first}, timeout=ping_s or None)
    if first.done():
        first.result()
    return EventStream(exchange, first, chunks, ping_s, format)


class EventStream(Response):
    def __init__(
        self,
        exchange: HttpExchange,
        first: "asyncio.Future[bytes]",
        chunks: AsyncGenerator[bytes, None],
        ping_s: float,
        format: StreamFormat,
    ) -> None:
        super().__init__(headers=_HEADERS, media_type="text/event-stream")
        del self.headers["content-length"]
        self._exchange, self._first, self._chunks = exchange, first, chunks
        self._ping_s, self._format = ping_s, format
        self._last, self._num_sending = monotonic(), 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        pings = asyncio.create_task(self._break_silence()) if self._ping_s else None
        try:
            await self._send_all()
        finally:
            if pings is not None:
                pings.cancel()
        await send({"type": "http.response.body", "body": self._format.done, "more_body": False})

    async def _send_all(self) -> None:
        try:
            await self._send_chunk(await self._first)
            async for chunk in self._chunks:
                await self._send_chunk(chunk)
        except ClientGoneError:
            raise
        except Exception as error:
            found = explain(error, self._exchange.id)
            await self._send_chunk(self._format.failure(found))

    async def _send_chunk(self, chunk: bytes) -> None:
        """Bypasses the middleware, which only needs the beginning and the end of a reply."""
        self._last = monotonic()
        self._num_sending += 1
        try:
            await self._exchange.send({"type": "http.response.body", "body": chunk, "more_body": True})
        finally:
            self._num_sending -= 1

    async def _break_silence(self) -> None:
        """Sends pings, unless a chunk is still waiting for the client to read."""
        while True:
            silence = monotonic() - self._last
            if not self._num_sending and silence >= self._ping_s:
                await self._send_chunk(self._format.ping)
                silence = 0.0
            await asyncio.sleep(max(self._ping_s - silence, min(self._ping_s, TICK_S)))


async def _end(first: "asyncio.Future[bytes]", chunks: AsyncGenerator[bytes, None]) -> None:
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await chunks.aclose()

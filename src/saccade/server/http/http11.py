"""uvicorn's HTTP/1.1 with limits before a request is complete, and API-shaped replies to malformed requests."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, cast

import httptools
import orjson
from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from saccade.server.http.origins import PROBES
from saccade.server.http_errors import HttpError

RESERVED = 16  # connections beyond the limit, for probes
RESERVED_S = 2.0  # how soon they must send one
BUSY_RETRY_S = 2.0
LINGER_S = 5.0  # for a client that still sends a body to see that it has its reply
CHECKS_PER_TIMEOUT = 8  # of a client that may have stopped reading
# Everything read from a socket is parsed at once, so many small parts would block the event loop.
MAX_PIPELINED = 64  # requests of a connection that wait for earlier replies
MAX_HEADERS = 256
MANY_CHUNKS, MIN_CHUNK_BYTES = 2048, 32  # a body with more chunks needs larger ones on average
_HOP_HEADERS = frozenset({b"upgrade", b"http2-settings", b"connection"})
_UPGRADE_TOKENS = frozenset({b"upgrade", b"http2-settings"})


class BoundedProtocol(HttpToolsProtocol):
    """The parser buffers heads, trailers and chunk sizes until they are complete. Without a limit an endless one fills
    memory. Without a timeout, clients that send no head or read no reply use up the connections: a reply waits for room
    in the buffer, and a closing connection for the buffer to drain.

    Clients that offer another protocol (Java's offers HTTP/2 with every request) are answered in HTTP/1.1. Invalid HTTP
    is refused after the earlier requests have their replies, so no reply is corrupted or lost. The same goes for too
    many requests, headers or chunks. Connections beyond the limit get a 503, but a few of them are read first, because
    probes must get through when the server is full.

    Closing a connection while a body is still arriving would reset it, and proxies then lose the reply. So only our
    half is closed at first, and the rest of the body is dropped.
    """

    max_header_bytes = 64 * 1024
    timeout_s = 60.0
    max_connections = 16384
    _is_extra = False  # beyond the limit: may send one probe
    _held_bytes = 0  # since the parser last delivered anything
    _is_in_head = _is_in_body = False
    _num_chunks = _num_body_bytes = 0  # of the request being read
    _is_upgrade = False
    _is_refused = False
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _linger_timer: asyncio.TimerHandle | None = None
    _unread_bytes = 0  # at the last check; the same since `_read_at`
    _read_at = 0.0
    _serving: RequestResponseCycle | None = None
    _last_words: HttpError | None = None  # sent before closing; nothing more is read

    @classmethod
    def limited(
        cls, max_header_bytes: int, timeout_s: float = 60.0, max_connections: int = 16384
    ) -> type["BoundedProtocol"]:
        """`timeout_s=0` lets clients send and read as slowly as they like."""
        limits = {"max_header_bytes": max_header_bytes, "timeout_s": timeout_s, "max_connections": max_connections}
        return type("LimitedProtocol", (cls,), limits)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._replies = cast("asyncio.Transport", _Replies(transport.write, self._is_leaving, self._close))
        self._is_extra = len(self.connections) > self.max_connections
        if len(self.connections) > self.max_connections + RESERVED:
            self._refuse(self._full())
            return
        self._await_head()
        if self.timeout_s:
            self._watch_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        """uvicorn tells only the newest request that the client is gone; the one being served must know, too."""
        self._end_wait()
        for timer in (self._write_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self._end_serving()

    def _end_serving(self) -> None:
        if self._serving is not None and not self._serving.response_complete:
            self._serving.disconnected = True
            self._serving.message_event.set()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._last_words is not None or self._linger_timer is not None:
            return
        self._held_bytes += len(data)
        left: bytes | None = data
        while left is not None and self._last_words is None and not self.transport.is_closing():
            left = self._feed(left)
        if self.transport.is_closing() or self._last_words is not None:
            return
        if self._held_bytes > self.max_header_bytes:
            text = f"the headers have more than {self.max_header_bytes} bytes, which is the limit"
            self._refuse(HttpError(431, text, code="headers_too_large"))
        elif not self._is_in_head:
            self._end_wait()
        elif self._head_timer is None:
            self._await_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._held_bytes, self._is_in_head, self._is_upgrade = 0, True, False
        self._num_chunks = self._num_body_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:  # nobody reads trailers
            return
        if len(self.headers) >= MAX_HEADERS:
            text = f"the request has more than {MAX_HEADERS} headers, which is the limit"
            self._stop(HttpError(431, text, code="headers_too_large"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._held_bytes, self._is_in_head, self._is_in_body = 0, False, True
        self._is_upgrade = self.parser.should_upgrade()
        if self._is_refused:
            return
        if (error := self._head_error()) is not None:
            self._is_refused = True  # nothing after this head is a request
            self._refuse(error)
        elif len(self.pipeline) >= MAX_PIPELINED:
            text = f"more than {MAX_PIPELINED} requests of this connection wait for their replies; wait for some first"
            self._stop(HttpError(429, text, code="too_many_pipelined", retry_after_s=BUSY_RETRY_S))
        elif not self._is_upgrade:
            super().on_headers_complete()
            self.cycle.keep_alive &= not self._is_extra
            self.cycle.transport = self._replies

    def on_body(self, body: bytes) -> None:
        self._held_bytes = 0
        self._num_chunks += 1
        self._num_body_bytes += len(body)
        if self._num_chunks > MANY_CHUNKS and self._num_body_bytes < MIN_CHUNK_BYTES * self._num_chunks:
            self._stop(HttpError(400, "the body has too many small chunks; send larger ones", code="invalid_http"))
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._held_bytes, self._is_in_body = 0, False
        if self._linger_timer is not None:
            self.transport.close()
        elif not self._is_upgrade and not self._is_refused:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(_invalid())

    def on_response_complete(self) -> None:
        if self._linger_timer is not None:
            self.server_state.total_requests += 1
            return
        super().on_response_complete()
        if self._last_words is not None and not self._num_unanswered():
            self._end_with(self._last_words)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._serving = cycle
        super()._start_asgi_task(cycle, app if cycle.scope["http_version"] == "1.1" else _without_chunks(cycle, app))

    def _head_error(self) -> HttpError | None:
        if not self._has_host():
            return _invalid()
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]):
            text = "the only supported Transfer-Encoding is chunked"
            return HttpError(501, text, code="unsupported_transfer_coding", should_retry=False)
        return self._full() if self._is_extra and not self._is_probe() else None

    def _has_host(self) -> bool:
        """HTTP/1.1 requires exactly one Host header; HTTP/1.0 may omit it."""
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        return num_hosts == 1 or (num_hosts == 0 and self.parser.get_http_version() != "1.1")

    def _is_probe(self) -> bool:
        path = self.url.partition(b"?")[0].decode("latin-1")
        return path.removeprefix(self.root_path) in PROBES

    def _full(self) -> HttpError:
        text = f"{self.max_connections} connections are open, which is the limit; try again later (--max-connections)"
        return HttpError(503, text, code="too_many_connections", retry_after_s=BUSY_RETRY_S)

    def _feed(self, data: bytes) -> bytes | None:
        """Returns what is left to read after the parser stopped for an upgrade."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._without_upgrade() + data[upgrade.args[0] :]
        except httptools.HttpParserError:
            self.send_400_response("")
        return None

    def _without_upgrade(self) -> bytes:
        """The head again, without what makes the parser treat the body as another protocol."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            self.send_400_response("")
        given = b",".join(value for name, value in self.headers if name == b"connection").split(b",")
        kept = [token.strip() for token in given if token.strip().lower() not in _UPGRADE_TOKENS]
        headers = [(name, value) for name, value in self.headers if name not in _HOP_HEADERS]
        lines = [name + b": " + value for name, value in [*headers, (b"connection", b", ".join(kept))]]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return b"\r\n".join([method + b" " + self.url + b" HTTP/" + version, *lines, b"", b""])

    def _await_head(self) -> None:
        limit_s = RESERVED_S if self._is_extra else self.timeout_s
        if limit_s:
            self._head_timer = self.loop.call_later(limit_s, self._give_up)

    def _end_wait(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        if self._is_in_head:
            self._refuse(HttpError(408, "the head took too long to arrive", code="head_timeout"))
        else:
            self.transport.close()

    def _watch_reader(self) -> None:
        """Aborts the connection of a client that reads nothing. Checks only while nothing is added to the buffer, when
        any change means that the client reads."""
        waits = self.flow.write_paused or self.transport.is_closing()
        unread = self.transport.get_write_buffer_size() if waits else 0
        if not unread or unread != self._unread_bytes:
            self._unread_bytes, self._read_at = unread, self.loop.time()
        elif self.loop.time() - self._read_at >= self.timeout_s:
            self.transport.abort()
            return
        self._write_timer = self.loop.call_later(self.timeout_s / CHECKS_PER_TIMEOUT, self._watch_reader)

    def _stop(self, error: HttpError) -> NoReturn:
        """Refuses from within a callback: raising there stops the parser."""
        self._is_refused = True
        self._refuse(error)
        raise error

    def _refuse(self, error: HttpError) -> None:
        """Ends the connection with an error, once all earlier requests have their replies."""
        if self.transport.is_closing() or self._last_words is not None:
            return
        self._end_wait()
        self._last_words = error
        if self.pipeline and self.pipeline[0][0].more_body:  # its body is what went wrong
            self.pipeline.popleft()
        if not self._num_unanswered():
            self._end_with(error)

    def _num_unanswered(self) -> int:
        """Complete requests without a complete reply."""
        serving = self._serving
        is_served = serving is not None and not serving.more_body and not serving.response_complete
        return len(self.pipeline) + is_served

    def _end_with(self, error: HttpError) -> None:
        """Sends the error and closes the connection. Only closes it if a reply is unfinished: the error must not end up
        inside that reply. Does nothing if the last reply has closed it."""
        if self._is_leaving():
            return
        serving = self._serving
        if serving is None or serving.response_complete or not serving.response_started:
            body = orjson.dumps(error.envelope())
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n" % len(body)
            more = "".join(f"{name}: {value}\r\n" for name, value in error.headers().items()).encode()
            self.transport.write(STATUS_LINE[error.status] + head + more + b"\r\n" + body)
        self._close()

    def _close(self) -> None:
        """Closes the connection, or only our half of it while a body is still arriving."""
        if not self._is_in_body or self._is_extra or not self.transport.can_write_eof():
            self.transport.close()
        elif not self._is_leaving():
            self.transport.write_eof()
            self.flow.resume_reading()
            self._linger_timer = self.loop.call_later(LINGER_S, self.transport.close)
            self._end_serving()

    def _is_leaving(self) -> bool:
        return self._linger_timer is not None or self.transport.is_closing()


@dataclass(frozen=True, slots=True)
class _Replies:
    """The part of a transport that replies are written to."""

    write: Callable[[bytes], None]
    is_closing: Callable[[], bool]
    close: Callable[[], None]


def _without_chunks(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """For HTTP/1.0, where a body of unknown length ends with the connection, which uvicorn closes after the reply."""

    async def respond(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        has_length = False

        async def send_plain(message: ASGISendEvent) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                cycle.chunked_encoding = None if has_length else False
            elif message["type"] == "http.response.body" and not has_length:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return respond


def _invalid() -> HttpError:
    return HttpError(400, "the request is not valid HTTP", code="invalid_http")

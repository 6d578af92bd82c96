"""One keep-alive HTTP/1.1 connection of the benchmark's client. General HTTP clients spend more time on a request than
a fast server does. Here a request is one write, httptools parses replies in the event loop's callbacks, and the clock
is read before the data is parsed."""

import asyncio
import ssl
from dataclasses import dataclass
from time import perf_counter
from typing import cast
from urllib.parse import urlsplit

import httptools

from saccade.bench.load.client_reply import ReplyReader
from saccade.errors import ConfigError

CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class ServerAddress:
    host: str
    port: int
    is_tls: bool
    prefix: str  # comes before every path

    @classmethod
    def of(cls, url: str, flag: str = "--base-url") -> "ServerAddress":
        problem = ConfigError(f"{url!r} is no address of a server; write http://HOST:PORT ({flag})")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise problem from None
        is_plain_path = parts.path.isascii() and " " not in parts.path
        if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain_path:
            raise problem
        is_tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if is_tls else 80), is_tls, parts.path.rstrip("/"))

    @property
    def tls(self) -> ssl.SSLContext | None:
        return ssl.create_default_context() if self.is_tls else None

    def request(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", f"Host: {host}:{self.port}", "Accept: */*"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b"")


class Connection(asyncio.Protocol):
    """Handles one exchange at a time. While `is_usable`, another may follow."""

    def __init__(self) -> None:
        self.is_usable = True
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._done: asyncio.Future[None] | None = None
        self._reader: ReplyReader | None = None
        self._headers: dict[str, str] = {}
        self._ends_with_connection = False  # the reply has neither a length nor chunks
        self._now = 0.0

    @classmethod
    async def open(cls, address: ServerAddress) -> "Connection":
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_connection(cls, address.host, address.port, ssl=address.tls)
        except TimeoutError:
            raise ConnectionError(f"no connection after {CONNECT_S:g} s") from None
        return connection

    async def exchange(self, request: bytes, reader: ReplyReader) -> None:
        """Sends a request and reads the whole reply. The clock starts just before the first byte is sent. Raises
        ConnectionError if the connection closes too early; the reader keeps what arrived. Cancelling closes it."""
        assert self._transport is not None and self._done is None, "one exchange at a time"
        self._reader, self._headers = reader, {}
        self._done = asyncio.get_running_loop().create_future()
        try:
            reader.sent(perf_counter())
            self._transport.write(request)
            await self._done
        except BaseException:
            self.close()
            raise
        finally:
            self._done = self._reader = None

    def close(self) -> None:
        self.is_usable = False
        if self._transport is not None:
            self._transport.abort()

    # asyncio callbacks
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._now = perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"not HTTP: {error}"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_usable = False
        if self._ends_with_connection and error is None:
            self.on_message_complete()
        self._fail(ConnectionResetError("the connection was closed before the reply ended"))

    # httptools callbacks
    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._ends_with_connection = not self._headers.keys() & {"content-length", "transfer-encoding"}
        if self._reader is not None:
            self._reader.head(self._parser.get_status_code(), self._headers)

    def on_body(self, data: bytes) -> None:
        if self._reader is not None:
            self._reader.body(data, self._now)

    def on_message_complete(self) -> None:
        self._ends_with_connection = False
        if not self._parser.should_keep_alive():
            self.is_usable = False
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

"""What every request passes: an id, the limits of its head, the key, and one place where errors become replies."""

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from saccade.server.auth import Keys
from saccade.server.exchange import HttpExchange
from saccade.server.http_errors import ClientGoneError, HttpError, explain

OnEnd = Callable[[str, HttpExchange], None]


class Gate:
    """ASGI middleware. Paths are those of the scope: no header has a say in who may call what."""

    def __init__(self, app: ASGIApp, *, keys: Keys, root_path: str, max_header_bytes: int, on_end: OnEnd) -> None:
        self._app, self._keys, self._root_path = app, keys, root_path
        self._max_header_bytes = max_header_bytes
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        exchange = HttpExchange(scope, receive, send)
        try:
            async with exchange:
                try:
                    self._check(scope, exchange)
                    await self._app(scope, exchange.receive, exchange.send)
                except Exception as error:
                    await self._fail(error, scope, exchange)
        except ClientGoneError:
            exchange.status = 499
        finally:
            self._on_end(scope["path"], exchange)

    def _check(self, scope: Scope, exchange: HttpExchange) -> None:
        path = scope["path"].removeprefix(self._root_path) if self._root_path else scope["path"]
        self._keys.check(path, exchange.headers)
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if size > self._max_header_bytes:
            text = f"the headers have {size} bytes; the limit is {self._max_header_bytes} (--max-header-bytes)"
            raise HttpError(431, text, code="headers_too_large")

    async def _fail(self, error: Exception, scope: Scope, exchange: HttpExchange) -> None:
        if isinstance(error, ClientGoneError):
            raise error
        found = explain(error, exchange.id)
        if exchange.has_started:  # half a reply cannot be taken back: the connection is closed
            raise error
        await found.response()(scope, exchange.receive, exchange.send)

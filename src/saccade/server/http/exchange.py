"""One HTTP exchange: its id, its size-limited body, and its end if the client leaves."""

import asyncio
import re
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from time import monotonic
from types import TracebackType
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from saccade.server.http.body_scan import Body
from saccade.server.http_errors import ClientGoneError, HttpError
from saccade.server.sharing.callers import Caller
from saccade.server.sharing.read_turns import ReadTurns

ID_HEADER = b"x-request-id"
FREE_BYTES = 64 * 1024  # the beginning of a body, which needs no turn
_SANE_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")
_NO_SNIFFING = (b"x-content-type-options", b"nosniff")
SCOPE_KEY = "saccade.exchange"


class HttpExchange:
    """A request and its reply. Within `async with`, once the whole body is read, a client that leaves cancels the work
    for it. `exits` closes with the exchange, after the last byte of a stream."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.arrival = monotonic()
        self.headers: Mapping[bytes, bytes] = dict(scope["headers"])
        given = self.headers.get(ID_HEADER, b"")
        self.unique_id = uuid4().hex
        self.id = given.decode() if _SANE_ID.fullmatch(given) else self.unique_id  # clients may reuse theirs
        self.exits = AsyncExitStack()
        self.extra_headers: list[tuple[bytes, bytes]] = [(ID_HEADER, self.id.encode()), _NO_SNIFFING]
        self.caller: Caller | None = None  # known once the key is checked
        self.envelope: Callable[[HttpError], dict[str, Any]] = HttpError.envelope  # the body of an error
        self.status: int | None = None
        self.is_complete = False
        self._receive, self._send = receive, send
        self._is_gone = False
        self._watch: asyncio.Task[None] | None = None
        self._owner: asyncio.Task[object] | None = None
        scope[SCOPE_KEY] = self

    @classmethod
    def of(cls, request: Request) -> "HttpExchange":
        found = request.scope[SCOPE_KEY]
        assert isinstance(found, HttpExchange)
        return found

    async def __aenter__(self) -> "HttpExchange":
        self._owner = asyncio.current_task()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watch is not None:
            self._watch.cancel()
        try:
            await self.exits.aclose()
        finally:
            if self._is_gone and self._owner is not None and self._owner.cancelling():
                self._owner.uncancel()
                raise ClientGoneError from None

    async def receive(self) -> Message:
        if self._watch is not None:
            await asyncio.shield(self._watch)
            return {"type": "http.disconnect"}
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._is_gone = True
            raise ClientGoneError
        if not message.get("more_body", False):
            self._watch = asyncio.create_task(self._await_leave())
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self.extra_headers]
        elif not message.get("more_body", False):
            self.is_complete = True
        await self._send(message)

    async def body(
        self,
        *,
        limit: int,
        timeout_s: float,
        hold: Callable[[int], None] = lambda size: None,
        turns: ReadTurns | None = None,
    ) -> list[Body]:
        """The parts of the body. Raises as soon as the body is known to be too long. `hold` is called with the size of
        every part. Beyond `FREE_BYTES`, each part needs one of the `turns`."""
        length = self.headers.get(b"content-length", b"")
        _check_length(int(length) if length.isdigit() and len(length) < 20 else 0, limit)
        parts: list[Body] = []
        size, is_more = 0, True
        try:
            async with asyncio.timeout(timeout_s or None):
                while is_more:
                    if size < FREE_BYTES or turns is None:
                        message = await self.receive()
                    else:
                        async with turns.turn("" if self.caller is None else self.caller.name):
                            message = await self.receive()
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    _check_length(size, limit)
                    hold(len(parts[-1]))
                    is_more = message.get("more_body", False)
        except TimeoutError:
            raise HttpError(408, "the body took too long to arrive", code="body_timeout") from None
        return parts

    def leave(self) -> None:
        """Cancels the work for a client that is gone, or as good as gone."""
        if not self.is_complete and self._owner is not None:
            self._is_gone = True
            self._owner.cancel()

    async def _await_leave(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.leave()


def _check_length(size: int, limit: int) -> None:
    if size > limit:
        text = f"the body has more than {limit} bytes, which is the limit (--max-body-bytes)"
        raise HttpError(413, text, code="body_too_large")

"""The benchmark's client: requests over connections that are kept, each with an outcome whatever happens."""

import asyncio
import json
from dataclasses import replace
from time import perf_counter
from typing import Any

from saccade.bench.client_connection import Address, Connection
from saccade.bench.client_reply import Outcome, ReplyReader
from saccade.bench.serving_settings import TargetSettings

CONNECT_S = 10.0
ASK_S = 30.0


class Client:
    """Sends requests to one server over connections that are kept. Used on one event loop, then closed."""

    def __init__(self, target: TargetSettings) -> None:
        self.target = target
        self.address = Address.of(target.url)
        self._headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
        self._idle: list[Connection] = []

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *exception: object) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # for the transports to go

    async def open(self, count: int) -> None:
        """Have that many connections ready, so that no request waits for its own."""
        async with asyncio.timeout(CONNECT_S):
            fresh = await asyncio.gather(*(Connection.open(self.address) for _ in range(count - len(self._idle))))
        self._idle += fresh

    def prepare(self, body: bytes, headers: dict[str, str] | None = None) -> bytes:
        """The bytes of a request to the endpoint under test."""
        return self.address.request("POST", self.target.path, body, self._headers | (headers or {}))

    async def send(self, request: bytes, index: int = 0, clock_at: float = 0.0) -> Outcome:
        """One request to its end, whatever that is."""
        reader = ReplyReader()
        failure = None
        connect_s = 0.0
        try:
            async with asyncio.timeout(self.target.request_timeout_s):
                connect_s = await self._exchange(request, reader)
        except TimeoutError:
            failure = "timeout", f"no end after {self.target.request_timeout_s:g} s"
        except OSError as error:
            failure = _kind(error, reader), str(error)
        return replace(reader.outcome(index, clock_at, failure), connect_s=connect_s)

    async def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """Status and body of a side question, to another path than the one under test."""
        reader = _PlainReader()
        data = json.dumps(body).encode() if body is not None else None
        async with asyncio.timeout(ASK_S):
            await self._exchange(self.address.request(method, path, data, self._headers), reader)
        return reader.status, bytes(reader.data)

    async def _exchange(self, request: bytes, reader: "ReplyReader | _PlainReader") -> float:
        """One exchange on an idle connection or a new one. A kept connection that the server gave up in the meantime
        is replaced once, with the clock running; returns the seconds it took to connect before anything was sent."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_usable:
                continue
            try:
                await connection.exchange(request, reader)
            except ConnectionError:
                if reader.status:
                    raise
                break
            self._keep(connection)
            return 0.0
        began = perf_counter()
        async with asyncio.timeout(CONNECT_S):
            connection = await Connection.open(self.address)
        connect_s = perf_counter() - began
        await connection.exchange(request, reader)
        self._keep(connection)
        return connect_s

    def _keep(self, connection: Connection) -> None:
        if connection.is_usable:
            self._idle.append(connection)
        else:
            connection.close()


class _PlainReader:
    def __init__(self) -> None:
        self.status = 0
        self.data = bytearray()

    def sent(self, now: float) -> None: ...

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.status = status

    def body(self, data: bytes, now: float) -> None:
        self.data += data


def _kind(error: OSError, reader: ReplyReader) -> str:
    if not reader.sent_at:
        return "cannot connect"
    return "disconnected in the reply" if reader.status else "disconnected before a reply"

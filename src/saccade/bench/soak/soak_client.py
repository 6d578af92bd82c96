"""Clients of a soak. They read the whole reply, disconnect early, or read slowly."""

import asyncio
from dataclasses import dataclass
from random import Random

from saccade.bench.load.client import Client
from saccade.bench.load.client_connection import Connection, ServerAddress
from saccade.bench.load.client_reply import ReplyReader
from saccade.bench.soak.soak_requests import SoakRequest

SLOW_BYTES, SLOW_S = 2048, 0.05  # a slow reader reads so much, then sleeps so long
MAX_PIECES = 6  # pieces of a stream that a client reads before it leaves
AT_ONCE_S = 0.1  # a client that leaves at once does so within this time


@dataclass(frozen=True, slots=True)
class SoakAnswer:
    """`status` is 0 if none came. `has_left` means that the client left early. `problem` says why a reply is not
    complete."""

    status: int
    has_left: bool = False
    problem: str = ""

    @property
    def outcome(self) -> str:
        """The name under which the answer is counted."""
        return "left" if self.has_left and self.status in (0, 200) else str(self.status or "no answer")


async def send(client: Client, request: SoakRequest) -> SoakAnswer:
    """Sends a request, one at a time, in its manner. A failure is an answer, not an exception."""
    data, timeout_s = client.prepare(request.body, request.path), client.target.request_timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            match request.manner:
                case "whole":
                    return await _whole(client, data)
                case "slow":
                    return await _slowly(client.address, data)
                case "leave":
                    return await _leave(client.address, data, 1 + request.index % MAX_PIECES, timeout_s)
                case "leave at once":
                    return await _leave(client.address, data, 1, Random(request.index).uniform(0, AT_ONCE_S))
    except TimeoutError:
        return SoakAnswer(0, problem=f"no end after {timeout_s:g} s")
    except (OSError, asyncio.IncompleteReadError) as error:
        return SoakAnswer(0, problem=f"{type(error).__name__}: {error}")


async def _whole(client: Client, data: bytes) -> SoakAnswer:
    reader = ReplyReader()
    try:
        await client.exchange_once(data, reader)
    except ConnectionError as error:
        return SoakAnswer(reader.status, problem=str(error))
    outcome = reader.outcome(0, 0.0)
    return SoakAnswer(reader.status, problem=f"{outcome.error}: {outcome.message}" if outcome.error else "")


async def _leave(address: ServerAddress, data: bytes, num_pieces: int, wait_s: float) -> SoakAnswer:
    reader = _Counting(num_pieces)
    connection = await Connection.open(address)
    exchange = asyncio.ensure_future(connection.exchange(data, reader))
    enough = asyncio.ensure_future(reader.enough.wait())
    try:
        await asyncio.wait({exchange, enough}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        exchange.cancel()
        enough.cancel()
        [ended, _] = await asyncio.gather(exchange, enough, return_exceptions=True)
        connection.close()
    problem = str(ended) if isinstance(ended, OSError) else ""
    return SoakAnswer(reader.status, has_left=True, problem=problem)


async def _slowly(address: ServerAddress, data: bytes) -> SoakAnswer:
    """Reads a little at a time, so that the server has to hold back the rest."""
    stream, writer = await asyncio.open_connection(address.host, address.port, ssl=address.tls, limit=SLOW_BYTES)
    try:
        writer.write(data.replace(b"Accept: */*", b"Accept: */*\r\nConnection: close", 1))
        words = (await stream.readline()).split()
        status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
        tail = b""
        while status == 200 and b"[DONE]" not in tail and (part := await stream.read(SLOW_BYTES)):
            tail = (tail + part)[-64:]
            await asyncio.sleep(SLOW_S)
    finally:
        writer.transport.abort()
    is_whole = status != 200 or b"[DONE]" in tail
    return SoakAnswer(status, problem="" if is_whole else "the stream ended without its final event")


class _Counting(ReplyReader):
    """Sets `enough` once a stream has delivered `num_pieces` pieces."""

    def __init__(self, num_pieces: int) -> None:
        super().__init__()
        self.enough = asyncio.Event()
        self._num_left = num_pieces

    def body(self, data: bytes, now: float) -> None:
        super().body(data, now)
        self._num_left -= 1
        if self._num_left <= 0:
            self.enough.set()

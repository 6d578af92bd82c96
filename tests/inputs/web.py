"""A web server for tests, and fetchers that see it as the internet."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpcore2

from saccade.inputs.media.fetch import Fetcher, FetchPolicy

PUBLIC = "93.184.215.14"
LIMIT_S = 120.0
Reply = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


def live(test: Coroutine[Any, Any, None]) -> None:
    """Runs a test's coroutine, which must not hang or leave tasks behind."""

    async def watched() -> None:
        await asyncio.wait_for(test, LIMIT_S)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks were left behind: {left}"

    asyncio.run(watched())


def skip(seconds: float) -> None:
    """Moves the clock of the running event loop forward, so that time limits pass at a known moment."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]


@dataclass
class Web:
    """Records names looked up, connections and requests."""

    port: int = 0
    connections: int = 0
    open: int = 0
    requests: list[str] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    dialled: list[str] = field(default_factory=list)
    resolved: list[str] = field(default_factory=list)
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    def fetcher(self, *, names: Mapping[str, Sequence[Sequence[str]]] | None = None, **policy: Any) -> Fetcher:
        """`names` has the name service's answers for each host, in order; the last one repeats. Connections to the
        public address arrive here."""
        answers = {name: list(found) for name, found in (names or {"media.test": [[PUBLIC]]}).items()}
        context = policy.pop("ssl_context", None)

        async def resolve(host: str, port: int) -> Sequence[str]:
            self.resolved.append(host)
            found = answers.get(host, [[]])
            return found.pop(0) if len(found) > 1 else found[0]

        async def dial(address: str, port: int) -> httpcore2.AsyncNetworkStream:
            self.dialled.append(address)
            target = "127.0.0.1" if address == PUBLIC else address
            return await httpcore2.AnyIOBackend().connect_tcp(target, self.port, timeout=LIMIT_S)

        policy = {"allows_all": True} | policy
        return Fetcher(FetchPolicy(**policy), resolve=resolve, dial=dial, ssl_context=context)


@contextlib.asynccontextmanager
async def serve(reply: Reply, context: ssl.SSLContext | None = None) -> AsyncIterator[Web]:
    web = Web()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        web.connections += 1
        web.open += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            web.heads.append(head)
            web.requests.append(head.split()[1])
            await reply(head.split()[1], writer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            web.open -= 1
            web.closed.set()
            writer.close()
            with contextlib.suppress(OSError, ssl.SSLError):
                await writer.wait_closed()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
    web.port = server.sockets[0].getsockname()[1]
    try:
        yield web
    finally:
        server.close()
        for _ in range(5000):
            if web.open == 0:
                break
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.02)


async def drip(path: str, writer: asyncio.StreamWriter) -> None:
    """A slow reply that does not finish before the client leaves."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while not writer.is_closing():
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.01)


def answer(body: bytes, status: str = "200 OK", **headers: str) -> Reply:
    async def reply(path: str, writer: asyncio.StreamWriter) -> None:
        lines = {"Content-Length": str(len(body))} | {name.replace("_", "-"): value for name, value in headers.items()}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        writer.write(f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body)

    return reply

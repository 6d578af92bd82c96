"""HTTP/1.1 on the wire: incomplete requests are bounded, and odd ones are still answered."""

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import orjson
import pytest
import uvicorn

from saccade.server.app import build_app
from saccade.server.http import http11
from saccade.server.http.http11 import LINGER_S, MAX_PIPELINED, RESERVED, BoundedProtocol
from saccade.server.service import Service
from tests.server.fake import HANG_S, Caller, FakeEngine

Scripted = Callable[..., tuple[Caller, FakeEngine, Service]]
H2C = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
CLOSE = "Connection: close\r\n"
OK = b"HTTP/1.1 200"
TIMEOUT_S = 60.0
T = TypeVar("T")


async def words(prompt: Any, params: Any) -> AsyncGenerator[dict[str, Any], None]:
    yield {"text": "a", "token_ids": (5,)}
    await asyncio.sleep(1000)


async def flood(prompt: Any, params: Any) -> AsyncGenerator[dict[str, Any], None]:
    while True:
        yield {"text": "a" * 2**16, "token_ids": (5,)}
        await asyncio.sleep(0)


def post(headers: str = "", **fields: Any) -> bytes:
    body = orjson.dumps({"messages": [{"role": "user", "content": "hi"}], **fields})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


class SteppedLoop(asyncio.SelectorEventLoop):
    """Its clock can be put forward: a minute is then over at once, and a limit can be so long that a busy machine does
    not reach it by itself."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


def run_stepped(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=SteppedLoop) as runner:
        return runner.run(work)


async def put_forward(seconds: float) -> None:
    """Timers that are due meanwhile have fired when this returns."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SteppedLoop)
    loop.ahead_s += seconds
    await asyncio.sleep(0.005)


class QuickServer(uvicorn.Server):
    """Ends at once. uvicorn looks every 0.1 s whether it should end, and then waits 0.1 s for its connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ending = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.ending.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await asyncio.sleep(0)


@asynccontextmanager
async def listening(service: Service, timeout_s: float = TIMEOUT_S, max_connections: int = 100) -> AsyncIterator[int]:
    """Serves an app with uvicorn and yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        http = BoundedProtocol.limited(4096, timeout_s, max_connections)
        how: dict[str, Any] = {"ws": "none", "lifespan": "off", "log_config": None, "loop": "none"}
        config = uvicorn.Config(build_app(service), http=http, timeout_keep_alive=int(HANG_S), **how)
        server = QuickServer(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.ending.set()
            await asyncio.wait_for(task, HANG_S)


async def answered(port: int, *parts: bytes) -> bytes:
    """Everything the server sends until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0.002)
    try:
        return await asyncio.wait_for(reader.read(), HANG_S)
    finally:
        writer.close()


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while not is_true():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("size", [17, 97, 10**6])
def test_a_client_that_offers_another_protocol_is_answered_in_http11(scripted: Scripted, size: int) -> None:
    """Java's client offers HTTP/2 with every request, and reuses the connection."""
    _, engine, service = scripted()
    sent = post(H2C) * 2 + post("Connection: Upgrade, close\r\nUpgrade: h2c\r\n")

    async def run() -> bytes:
        async with listening(service) as port:
            return await answered(port, *(sent[i : i + size] for i in range(0, len(sent), size)))

    found = asyncio.run(run())
    assert found.count(b"HTTP/1.1 200 OK") == 3 and found.count(b"two words") == 3 and len(engine.seen) == 3


def test_connect_is_refused(scripted: Scripted) -> None:
    _, _, service = scripted()

    async def run() -> bytes:
        async with listening(service) as port:
            return await answered(port, b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n")

    assert asyncio.run(run()).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ([], b""),
        ([b"GET /health HT"], b"408"),
        ([b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET /health HTTP/1.1\r\nHo"], b"408"),
    ],
)
def test_a_head_that_never_arrives_times_out(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, sent: list[bytes], status: bytes
) -> None:
    _, _, service = scripted()
    arrived: list[bytes] = []  # begins with nothing when the connection is made
    made, received = BoundedProtocol.connection_made, BoundedProtocol.data_received

    def note_made(self: BoundedProtocol, transport: asyncio.Transport) -> None:
        made(self, transport)
        arrived.append(b"")

    def note_received(self: BoundedProtocol, data: bytes) -> None:
        received(self, data)
        arrived.append(data)

    monkeypatch.setattr(BoundedProtocol, "connection_made", note_made)
    monkeypatch.setattr(BoundedProtocol, "data_received", note_received)

    async def run() -> bytes:
        async with listening(service) as port:
            answer = asyncio.create_task(answered(port, *sent))
            await until(lambda: bool(arrived) and b"".join(arrived) == b"".join(sent))
            await put_forward(TIMEOUT_S)
            return await answer

    found = run_stepped(run())
    assert found.count(b"HTTP/1.1 200") == max(len(sent) - 1, 0)
    assert found.rpartition(b"HTTP/1.1 ")[2].startswith(status) if sent else found == b""


def test_a_slow_reply_is_not_a_slow_head(scripted: Scripted) -> None:
    is_late = asyncio.Event()

    async def slow(prompt: Any, params: Any) -> AsyncGenerator[dict[str, Any], None]:
        await is_late.wait()
        yield {"text": "late", "token_ids": (5,), "finish_reason": "stop"}

    _, engine, service = scripted(slow)

    async def run() -> bytes:
        async with listening(service) as port:
            answer = asyncio.create_task(answered(port, post(CLOSE)))
            await until(lambda: bool(engine.running))
            await put_forward(TIMEOUT_S + 1)
            is_late.set()
            return await answer

    assert b"late" in run_stepped(run())


def test_trailers_are_dropped_and_bounded(scripted: Scripted) -> None:
    _, _, service = scripted()
    head, _, body = post(CLOSE).partition(b"\r\n\r\n")
    head = b"\r\n".join(line for line in head.split(b"\r\n") if b"Length" not in line)
    chunked = head + b"\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % len(body) + body + b"\r\n0\r\nX-Trailer: "

    async def run() -> None:
        async with listening(service) as port:
            assert (await answered(port, chunked + b"a\r\n\r\n")).startswith(b"HTTP/1.1 200")
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(chunked)
            with pytest.raises(ConnectionError):
                async with asyncio.timeout(HANG_S):
                    while True:
                        writer.write(b"a" * 4096)
                        await writer.drain()
                        await asyncio.sleep(0.001)
            writer.close()

    asyncio.run(run())
    assert service.is_idle


def test_garbage_during_a_reply_is_refused_after_it(scripted: Scripted) -> None:
    is_sent = asyncio.Event()

    async def halves(prompt: Any, params: Any) -> AsyncGenerator[dict[str, Any], None]:
        yield {"text": "first", "token_ids": (5,)}
        await is_sent.wait()
        yield {"text": "second", "token_ids": (6,), "finish_reason": "stop"}

    _, _, service = scripted(halves)

    async def run() -> bytes:
        async with listening(service) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(post(stream=True))
            head = await asyncio.wait_for(reader.readuntil(b'"first"'), HANG_S)
            writer.write(b"NO HTTP\r\n\r\n")
            await writer.drain()
            await asyncio.sleep(0.05)
            is_sent.set()
            rest = await asyncio.wait_for(reader.read(), HANG_S)
            writer.close()
            return head + rest

    first, _, second = asyncio.run(run()).rpartition(b"HTTP/1.1 ")
    assert first.count(b"HTTP/1.1") == 1 and first.endswith(b"[DONE]\n\n\r\n0\r\n\r\n") and b"second" in first
    assert second.startswith(b"400")


GARBAGE = [b"NO HTTP\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"]
CUT = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nno chunk\r\n"


@pytest.mark.parametrize("garbage", [*GARBAGE, CUT])
@pytest.mark.parametrize("num", [1, 3])
def test_requests_before_garbage_are_answered(
    scripted: Scripted, caplog: pytest.LogCaptureFixture, garbage: bytes, num: int
) -> None:
    _, engine, service = scripted()

    async def run() -> bytes:
        async with listening(service) as port:
            return await answered(port, post() * num + garbage + post())

    found = asyncio.run(run())
    assert found.count(b"two words") == num == len(engine.seen) and found.count(b"HTTP/1.1 ") == num + 1
    assert found.rpartition(b"HTTP/1.1 ")[2].startswith(b"400") and service.is_idle
    assert not [record for record in caplog.records if record.levelno > logging.INFO], "a refusal is not an error"


def test_requests_after_a_refused_head_are_ignored(scripted: Scripted) -> None:
    """All arrive in one read. The later ones once started, waited for their bodies and held up the refusal."""
    _, engine, service = scripted()
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"

    async def run() -> bytes:
        async with listening(service) as port:
            return await answered(port, health + b"GET / HTTP/1.1\r\n\r\n" + post() + health * 2)

    found = asyncio.run(run())
    assert [part[:3] for part in found.split(b"HTTP/1.1 ")[1:]] == [b"200", b"400"] and not engine.seen


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "code", "callback"),
    [
        (HEALTH * 300, b"too_many_pipelined", "on_headers_complete"),
        (post() * 150, b"too_many_pipelined", "on_headers_complete"),
        (HEALTH[:-2] + b"a:\r\n" * 900 + b"\r\n", b"headers_too_large", "on_header"),
        (CHUNKED + b"1\r\nx\r\n" * 2900, b"invalid_http", "on_body"),
    ],
    ids=["probes", "requests", "headers", "chunks"],
)
def test_parsing_many_small_parts_stops_early(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, sent: bytes, code: bytes, callback: str
) -> None:
    """However many arrive in one read, the parser calls back for only some, and the first requests get replies."""
    _, _, service = scripted()
    original, num_calls = getattr(BoundedProtocol, callback), 0

    def counted(self: BoundedProtocol, *words: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        original(self, *words)

    monkeypatch.setattr(BoundedProtocol, callback, counted)

    async def run() -> bytes:
        async with listening(service) as port:
            found = await answered(port, sent)
            assert (await answered(port, HEALTH.replace(b"\r\n\r\n", b"\r\n" + CLOSE.encode() + b"\r\n"))).startswith(
                OK
            )
            return found

    found = asyncio.run(run())
    head, _, body = found.rpartition(b"HTTP/1.1 ")
    assert code in body and num_calls <= 2049 and service.is_idle
    if code == b"too_many_pipelined":
        assert head.count(OK) == head.count(b"HTTP/1.1 ") == MAX_PIPELINED + 1 and num_calls < 100


def test_small_chunks_are_accepted_in_ordinary_numbers(scripted: Scripted) -> None:
    _, engine, service = scripted()
    body = post().partition(b"\r\n\r\n")[2] + b" " * 1800
    head = CHUNKED.replace(b"completions", b"chat/completions")[:-2] + CLOSE.encode() + b"\r\n"

    async def run() -> bytes:
        async with listening(service) as port:
            chunks = b"".join(b"1\r\n%c\r\n" % character for character in body)
            return await answered(port, head + chunks + b"0\r\n\r\n")

    assert b"two words" in asyncio.run(run()) and len(engine.seen) == 1


@pytest.mark.parametrize(
    "coding", ["gzip", "gzip, chunked", "identity", "chunked, chunked", "chunked\r\nTransfer-Encoding: x"]
)
def test_unknown_transfer_codings_are_refused(scripted: Scripted, coding: str) -> None:
    _, engine, service = scripted()
    head, _, body = post(f"Transfer-Encoding: {coding}\r\n").partition(b"\r\n\r\n")
    head = b"\r\n".join(line for line in head.split(b"\r\n") if b"Length" not in line)

    async def run() -> bytes:
        async with listening(service) as port:
            return await answered(port, head + b"\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))

    found = asyncio.run(run())
    assert found.split(b" ")[1] in (b"400", b"501") and found.count(b"HTTP/1.1") == 1 and not engine.seen
    if coding == "gzip, chunked":
        assert orjson.loads(found.partition(b"\r\n\r\n")[2])["error"]["code"] == "unsupported_transfer_coding"


def test_a_client_that_leaves_is_noticed_even_if_it_sent_another_request(scripted: Scripted) -> None:
    _, engine, service = scripted(words)

    async def run() -> None:
        async with listening(service) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(post() + post())
            await until(lambda: bool(engine.running))
            writer.close()
            await until(lambda: not engine.running and service.is_idle)

    asyncio.run(run())
    assert len(engine.seen) == 1


async def boulder(prompt: Any, params: Any) -> AsyncGenerator[dict[str, Any], None]:
    """More than socket buffers hold, all at once."""
    yield {"text": "a" * 2**25, "token_ids": (5,), "finish_reason": "stop"}


@pytest.mark.parametrize(("script", "stream"), [(flood, True), (boulder, True), (boulder, False)])
def test_a_client_that_does_not_read_is_disconnected(scripted: Scripted, script: Any, stream: bool) -> None:
    """Whether the reply is still being made or is waiting for room in the buffer. The socket is closed too."""
    _, engine, service = scripted(script, sse_ping_s=0.05)

    async def run() -> None:
        async with listening(service) as port:
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(post(stream=stream))
                await until(lambda: bool(engine.seen))
                for _ in range(5000):
                    if not engine.running and service.is_idle and not sockets_of(port):
                        return
                    await put_forward(TIMEOUT_S / 20)
                raise AssertionError("the connection is still there")

    run_stepped(run())


def sockets_of(port: int) -> list[str]:
    """The server's ends of open connections to a port, from the kernel's table."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    established = "01"
    return [row[2] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == established]


def test_a_slow_reader_gets_the_whole_reply(scripted: Scripted) -> None:
    _, _, service = scripted(boulder)

    async def run() -> int:
        async with listening(service) as port:  # the whole reply takes longer than the timeout, no part of it does
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**18)
            writer.write(post(CLOSE))
            size, taken_s = 0, 0.0
            while part := await asyncio.wait_for(reader.read(2**19), HANG_S):
                size += len(part)
                taken_s += (step_s := TIMEOUT_S / 20)
                await put_forward(step_s)
            writer.close()
            assert taken_s > TIMEOUT_S
            return size

    assert run_stepped(run()) > 2**25


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET /health HTTP/1.1\r\n", b"400"),
        ("GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n", b"400"),
        ("GET /health HTTP/1.1\r\nHost: a\r\n", b"200"),
        ("GET /health HTTP/1.0\r\n", b"200"),
    ],
)
def test_an_http11_request_needs_exactly_one_host(scripted: Scripted, head: str, status: bytes) -> None:
    _, _, service = scripted()

    async def run() -> None:
        async with listening(service) as port:
            found = await answered(port, (head + CLOSE + "\r\n").encode())
            assert found.split(b" ")[1] == status and found.count(b"HTTP/1.1") == 1
            if status == b"400":
                assert orjson.loads(found.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"

    asyncio.run(run())


@pytest.mark.parametrize("stream", [True, False])
def test_an_http10_client_gets_a_plain_body_that_ends_with_the_connection(scripted: Scripted, stream: bool) -> None:
    _, _, service = scripted()
    sent = post("Connection: keep-alive\r\n", stream=stream).replace(b"HTTP/1.1", b"HTTP/1.0")

    async def run() -> bytes:
        async with listening(service) as port:
            return await answered(port, sent)

    head, _, body = asyncio.run(run()).partition(b"\r\n\r\n")
    assert head.startswith(OK) and b"transfer-encoding" not in head and b"connection: close" in head
    assert (b"content-length: %d" % len(body) in head) is not stream
    if stream:
        assert body.startswith(b"data: {") and body.endswith(b"\n\ndata: [DONE]\n\n")


def test_a_body_after_a_refused_head_is_ignored(scripted: Scripted) -> None:
    _, engine, service = scripted()

    async def run() -> None:
        async with listening(service) as port:
            found = await answered(port, post().replace(b"Host: localhost\r\n", b""))
            assert found.split(b" ")[1] == b"400" and found.count(b"HTTP/1.1") == 1

    asyncio.run(run())
    assert not engine.seen and service.is_idle


def sent_in_vain(num_bytes: int) -> tuple[bytes, bytes]:
    """The head and the body of a request that is answered before its body has arrived. nginx sends them like this."""
    return b"POST /nowhere HTTP/1.0\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % num_bytes, bytes(num_bytes)


def test_a_client_that_sends_all_of_a_refused_body_before_it_reads_gets_the_reply(scripted: Scripted) -> None:
    _, _, service = scripted()

    async def run() -> bytes:
        loop = asyncio.get_running_loop()
        async with listening(service) as port:
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.setblocking(False)
                for part in sent_in_vain(2**24):
                    await asyncio.wait_for(loop.sock_sendall(client, part), HANG_S)
                found = b""
                while data := await asyncio.wait_for(loop.sock_recv(client, 2**16), HANG_S):
                    found += data
            return found

    assert asyncio.run(run()).split(b" ")[1] == b"404"


def test_a_client_that_never_ends_a_refused_body_is_disconnected(scripted: Scripted) -> None:
    _, _, service = scripted()

    async def run() -> None:
        async with listening(service) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head, body = sent_in_vain(2**24)
            writer.write(head + body[:100])
            assert await asyncio.wait_for(reader.read(), HANG_S), "and the server's half is closed"
            await put_forward(LINGER_S)
            with suppress(ConnectionError):
                async with asyncio.timeout(HANG_S):
                    while True:
                        writer.write(body[:100])
                        await writer.drain()
                        await asyncio.sleep(0.01)
            writer.close()

    run_stepped(run())


def test_connections_beyond_the_limit_get_a_503_but_probes_are_answered(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http11, "RESERVED_S", TIMEOUT_S / 2)
    _, _, service = scripted()
    probe = f"GET /health HTTP/1.1\r\nHost: localhost\r\n{CLOSE}\r\n".encode()

    async def run() -> None:
        async with listening(service, max_connections=2) as port:
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            found = await answered(port, post(CLOSE))
            assert found.startswith(b"HTTP/1.1 503") and b"\r\nretry-after: 2\r\n" in found, found
            error = orjson.loads(found.partition(b"\r\n\r\n")[2])["error"]
            assert error["code"] == "too_many_connections" and "--max-connections" in error["message"]
            assert (await answered(port, probe.replace(CLOSE.encode(), b""))).startswith(b"HTTP/1.1 200"), "one probe"
            waiting = [await asyncio.open_connection("127.0.0.1", port) for _ in range(RESERVED)]
            assert (await answered(port)).startswith(b"HTTP/1.1 503"), "nothing is read anymore"
            await put_forward(TIMEOUT_S / 2)
            for reader, writer in waiting:
                assert await asyncio.wait_for(reader.read(), HANG_S) == b"", (
                    "they must not hold the places reserved for probes"
                )
                writer.close()
            assert (await answered(port, probe)).startswith(b"HTTP/1.1 200")
            for _, writer in idle:
                writer.close()
                await writer.wait_closed()
            for _ in range(1000):
                if (found := await answered(port, post(CLOSE))).startswith(b"HTTP/1.1 200"):
                    return
            raise AssertionError(found)

    run_stepped(run())

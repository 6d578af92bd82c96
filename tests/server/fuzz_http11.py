"""A fuzzer for HTTP/1.1 input: heads, lengths, chunks, pipelines, upgrades, garbage.

Case i of a seed is always the same bytes: `python -m tests.server.fuzz_http11 --seed 7 --only 1234` repeats one, and
`--minutes 30` runs new ones for that long. Whatever the input, the connection sends valid HTTP, the application sees
only whole requests, and neither depends on how the bytes are cut. No sockets or timers are used.
"""

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

import httptools
import uvicorn
from uvicorn.server import ServerState

from saccade.server.http.http11 import BoundedProtocol
from tests.fuzzing import fuzz, fuzz_reader

MAX_HEADER_BYTES = 2000
TURNS = 40  # of the event loop; enough for the application to answer
ALLOWED = {200, 400, 408, 431, 501, 503}
LINES = (
    *(b"Host: localhost", b"Host: other", b"Content-Length: 3", b"Content-Length: 0", b"Content-Length: -1"),
    *(b"Content-Length: 99999999999999999999", b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip"),
    *(b"Expect: 100-continue", b"Connection: close", b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c"),
    *(b"HTTP2-Settings: AAEAAEAA", b"X: y", b" folded", b"no colon", b"\xff: \xfe", b"X: " + b"a" * 700, b"X : y"),
    *(b": y", b"Connection: keep-alive", b"TE: trailers"),
)
STARTS = (
    *(b"GET /health HTTP/1.1", b"POST /v1/completions HTTP/1.1", b"GET / HTTP/1.0", b"HEAD / HTTP/1.1"),
    *(b"OPTIONS * HTTP/1.1", b"CONNECT a:1 HTTP/1.1", b"GET http://a/ HTTP/1.1", b"PRI * HTTP/2.0", b"GET /"),
    *(b"get / HTTP/1.1", b"GET /\xff HTTP/1.1"),
)
BODIES = (
    b"",
    b"abc",
    b"3\r\nabc\r\n0\r\n\r\n",
    b"3\r\nabc\r\n0\r\nT: v\r\n\r\n",
    b"zz\r\n",
    b"fffffffff\r\n",
    b"3\r\nabcd",
)


class FoundError(AssertionError):
    """A case that the protocol neither answered nor refused properly."""


@dataclass(frozen=True, slots=True)
class WireCase:
    seed: int
    index: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Seen:
    """The statuses written, the requests that the application got, and whether the connection is closed."""

    statuses: tuple[int, ...]
    requests: tuple[tuple[str, str, bytes], ...]
    is_closed: bool


def make_case(seed: int, index: int) -> WireCase:
    random = Random(f"{seed}:{index}")
    data = b"".join(_message(random) for _ in range(random.randint(1, 4)))
    changed = bytearray(data)
    for _ in range(random.choice((0, 0, 0, 1, 3))):
        at = random.randrange(len(changed) + 1)
        changed[at : at + random.choice((0, 1, 5))] = random.choice(
            (b"", b"\0", b"\r", b"\n", b"\r\n\r\n", b"\xff", b":")
        )
    return WireCase(seed, index, bytes(changed))


def _message(random: Random) -> bytes:
    lines = [random.choice(STARTS)] if random.random() < 0.5 else [random.choice(STARTS[:2])]
    if random.random() < 0.8:
        lines.append(LINES[0])
    if random.random() < 0.6:
        lines += random.choice(([b"Content-Length: 3"], [b"Transfer-Encoding: chunked"], random.choices(LINES, k=3)))
    body = random.choice(BODIES)
    if lines[-1] == b"Content-Length: 3":
        body = b"abc"
    return b"\r\n".join([*lines, b"", b""]) + body


class _Wire(asyncio.Transport):
    """Keeps everything written. Like a socket's, it is closing as soon as it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.is_closed, self.is_ended = b"", False, False

    def write(self, data: Any) -> None:
        if self.is_ended:
            raise FoundError("written after the end")
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = self.is_ended = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.is_ended = True

    abort = close

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"sockname": ("127.0.0.1", 1), "peername": ("127.0.0.1", 2)}.get(name, default)

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def converse(pieces: list[bytes]) -> Seen:
    """The outcome of a connection that sends the pieces and then ends."""
    seen: list[tuple[str, str, bytes]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        seen.append((scope["method"], scope["path"], body))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else b"ok"})

    failures: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
    http = BoundedProtocol.limited(MAX_HEADER_BYTES, 0.0)
    config = uvicorn.Config(app, http=http, ws="none", lifespan="off", log_config=None, access_log=False)
    config.load()
    wire, state = _Wire(), ServerState()
    protocol = http(config, state, {})
    protocol.connection_made(wire)
    for piece in pieces:
        if wire.is_closed:
            break
        protocol.data_received(piece)
        await _turn()
    is_closed = wire.is_ended
    statuses = _statuses(wire.written, [method for method, _, _ in seen])
    protocol.connection_lost(None)
    await _turn()
    if failures or state.tasks:
        raise FoundError(f"{failures or state.tasks}"[:500])
    return Seen(statuses, tuple(seen), is_closed)


async def _turn() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


def _statuses(written: bytes, methods: list[str]) -> tuple[int, ...]:
    """The statuses of all replies. Raises unless these are valid HTTP. Replies to HEAD have no body."""
    found: list[int] = []
    while written:
        head, end, rest = written.partition(b"\r\n\r\n")
        if head.startswith(b"HTTP/1.1 100 ") and end:
            written = rest
            continue
        parser = httptools.HttpResponseParser(None)
        try:
            parser.feed_data(head + end)
        except httptools.HttpParserError as error:
            raise FoundError(f"{written[:200]!r} is not HTTP: {error}") from error
        status = parser.get_status_code()
        is_head = status == 200 and len(found) < len(methods) and methods[len(found)] == "HEAD"
        lengths = [
            int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
        ]
        if status not in ALLOWED or not end or len(lengths) != 1:
            raise FoundError(f"a reply is {written[:200]!r}")
        size = 0 if is_head else lengths[0]
        if len(rest) < size:
            raise FoundError(f"a reply is cut off: {written[:200]!r}")
        found.append(status)
        written = rest[size:]
    return tuple(found)


async def check(case: WireCase) -> None:
    random, data = Random(f"{case.seed}:{case.index}:cuts"), case.data
    places = sorted({0, len(data), *(random.randrange(len(data) + 1) for _ in range(random.randint(1, 9)))})
    pieces = [data[begin:end] for begin, end in pairwise(places)]
    try:
        whole, cut = await converse([data]), await converse(pieces)
    except FoundError:
        raise
    except Exception as error:
        raise FoundError(f"{type(error).__name__}: {error}") from error
    if len(whole.statuses) < len(whole.requests):
        raise FoundError(f"a request was not answered: {whole}")
    if whole != cut:
        raise FoundError(f"{whole} as a whole, {cut} in pieces {pieces}"[:1500])


def run_cases(seed: int, indices: Iterator[int]) -> Iterator[tuple[WireCase, FoundError | None]]:
    with asyncio.Runner() as runner:
        for index in indices:
            case = make_case(seed, index)
            try:
                runner.run(check(case))
            except FoundError as error:
                yield case, error
            else:
                yield case, None


def main() -> int:
    return fuzz(fuzz_reader(__doc__).parse_args(), run_cases)


if __name__ == "__main__":
    sys.exit(main())

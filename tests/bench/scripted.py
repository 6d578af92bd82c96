"""A server that does what a test tells it to: answers, delays, refusals and broken connections."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any

BOUND_S = 120.0
STEPS_OF_A_CONNECTION = 10  # of the event loop; it takes half as many


@dataclass
class Asked:
    """One request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: int

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class HangupError(Exception):
    """End the connection here."""


Reply = AsyncIterator[bytes]
Script = Callable[[Asked], Reply]


@dataclass
class Scripted:
    """What a test sees of its server."""

    url: str
    asked: list[Asked] = field(default_factory=list)
    num_connections: int = 0
    at_once: int = 0
    most_at_once: int = 0

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def bodies(self, path: str = "/v1/chat/completions") -> list[Any]:
        return [asked.json for asked in self.asked if asked.path == path]


@contextmanager
def serving(script: Script) -> Iterator[Scripted]:
    """The server in a thread of its own."""
    state = Scripted("")
    ready, loop = Event(), asyncio.new_event_loop()
    ending = asyncio.Event()

    async def main() -> None:
        server = await asyncio.start_server(lambda r, w: _serve(state, script, r, w), "127.0.0.1", 0, limit=2**26)
        state.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await ending.wait()
        for _ in range(STEPS_OF_A_CONNECTION):  # one that comes last gets a task that closes it
            await asyncio.sleep(0)
        server.close()
        own = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not own]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    thread = Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    assert ready.wait(BOUND_S)
    try:
        yield state
    finally:
        loop.call_soon_threadsafe(ending.set)
        thread.join(BOUND_S)
        assert not thread.is_alive()
        loop.close()


@contextmanager
def nobody() -> Iterator[str]:
    """An address where nobody listens, and which nobody else gets meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


async def _serve(state: Scripted, script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    state.num_connections += 1
    number = state.num_connections
    try:
        while True:
            asked = await _read(reader, number)
            state.asked.append(asked)
            state.at_once += 1
            state.most_at_once = max(state.most_at_once, state.at_once)
            try:
                async for data in script(asked):
                    writer.write(data)
                    await writer.drain()
            finally:
                state.at_once -= 1
    except (HangupError, asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader, number: int) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").splitlines()
    method, path, _ = head[0].split(" ")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Asked(method, path, headers, body, number)


def plain(status: int, body: bytes, kind: str = "application/json", more: str = "") -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\n{more}Content-Length: {len(body)}\r\n\r\n".encode() + body


def as_json(value: Any, status: int = 200) -> bytes:
    return plain(status, json.dumps(value).encode())


EVENTS_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "delta": fields, "finish_reason": finish}], "usage": None}


def usage(prompt: int, completion: int, images: int = 0, **more: Any) -> dict[str, Any]:
    details = {"cached_tokens": 0, "image_tokens": images}
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}
    return {"id": "x", "choices": [], "usage": counts, **more}


def stream_of(*words: str, prompt: int = 7, images: int = 0, timings: Any = None) -> list[Any]:
    """The events of a good answer."""
    told = [delta(role="assistant", content=""), *(delta(content=word) for word in words)]
    return [*told, delta("length"), usage(prompt, len(words), images, timings=timings), b"[DONE]"]


Wait = Callable[[int], Awaitable[None]]


async def no_wait(index: int) -> None:
    return None


async def stream(events: list[Any], wait: Wait = no_wait) -> Reply:
    """The events, each after the wait that belongs to it."""
    yield EVENTS_HEAD
    for index, value in enumerate(events):
        await wait(index)
        yield chunk(event(value))
    yield END

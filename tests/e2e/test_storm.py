"""Clients that leave at any moment: everything they held comes back."""

import asyncio
import random
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import orjson

from tests.e2e.conftest import IDLE_S, wait_idle
from tests.e2e.metrics import gauges
from tests.e2e.pictures import asked, encoded, image_part, picture
from tests.e2e.process import ServerProcess
from tests.e2e.test_lifecycle import paused

NUM_REQUESTS, WIDTH = 300, 24
BOUND_S = 600.0
HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n"
)


def body(rng: random.Random) -> bytes:
    kind = rng.choice(["text", "image", "images", "n"])
    parts = {"text": 0, "image": 1, "images": 3, "n": 1}[kind]
    images = [image_part(encoded(picture(rng.randrange(50), (rng.randrange(8, 200), 40)))) for _ in range(parts)]
    request = {
        "messages": asked(*images, text="a" * rng.randrange(1, 60)),
        "max_tokens": rng.choice([1, 20, 200]),
        "stream": rng.random() < 0.5,
        "ignore_eos": True,
        "n": 2 if kind == "n" else 1,
    }
    return orjson.dumps(request)


async def leave_early(host: str, port: int, rng: random.Random) -> None:
    """A request whose client leaves: before the body is sent, while it is prepared, queued, running, or at its end."""
    data = body(rng)
    reader, writer = await asyncio.open_connection(host, port)
    try:
        head = HEAD % len(data)
        sent = data if rng.random() < 0.85 else data[: rng.randrange(len(data))]
        writer.write(head + sent)
        await writer.drain()
        try:
            async with asyncio.timeout(rng.choice([0, 0.002, 0.01, 0.05, 0.2, 0.5])):
                while await reader.read(4096):
                    pass
        except TimeoutError:
            pass
    finally:
        writer.transport.abort()


async def storm(url: str, seed: int) -> None:
    address, rng = urlsplit(url), random.Random(seed)
    width = asyncio.Semaphore(WIDTH)

    async def one() -> None:
        async with width:
            await leave_early(address.hostname or "", address.port or 0, rng)

    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*(one() for _ in range(NUM_REQUESTS)))


def held(server: ServerProcess, http: httpx2.Client) -> dict[str, int]:
    info = http.get("/server_info", headers={"authorization": "Bearer boss"}).json()
    fds = len(list(Path(f"/proc/{server.popen.pid}/fd").iterdir()))
    return {"tasks": info["tasks"], "fds": fds, **info["requests"]}


def test_clients_that_leave_take_nothing_with_them(server: ServerProcess, http: httpx2.Client) -> None:
    asyncio.run(storm(server.url, 0))  # whatever is made on first use is there now
    wait_idle(http)
    before, ended = held(server, http), gauges(http.get("/metrics").text)["vllm:request_success_total"]
    asyncio.run(storm(server.url, 1))
    wait_idle(http)
    end = time.monotonic() + IDLE_S
    while not ((after := held(server, http))["tasks"] <= before["tasks"] + 2 and after["fds"] <= before["fds"] + 4):
        assert time.monotonic() < end, (before, after)
        time.sleep(0.1)
    assert after["inside"] == before["inside"] == 0
    assert gauges(http.get("/metrics").text)["vllm:request_success_total"] > ended
    reply = http.post(
        "/v1/chat/completions", json={"messages": asked(image_part(encoded(picture(1)))), "max_tokens": 3}
    )
    assert reply.status_code == 200 and "Traceback" not in server.text, server.text[-2000:]


def test_an_aborted_request_ends_and_says_so(server: ServerProcess, http: httpx2.Client) -> None:
    body = {
        "messages": asked(text="go on"),
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": True,
        "request_id": "mine",
    }
    reasons: list[str | None] = []
    engine = server.engine_pid()
    with http.stream("POST", "/v1/chat/completions", json=body) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                if not reasons:
                    with paused(engine), server.client() as other:  # it does not end before
                        assert other.post("/abort_request", json={"rid": "mine"}).status_code == 403
                        key = {"authorization": "Bearer boss"}
                        assert other.post("/abort_request", json={"rid": "other"}, headers=key).json() == {"aborted": 0}
                        assert other.post("/abort_request", json={"rid": "mine"}, headers=key).json() == {"aborted": 1}
                reasons.append(orjson.loads(line[6:])["choices"][0]["finish_reason"])
    assert reasons[-1] == "abort" and not any(reasons[:-1])

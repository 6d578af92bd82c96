"""What others notice of hostile requests: `python -m tests.e2e.hostile_latency [NAME ...]`. For each kind, four clients
send it again and again, while one asks for text and another for /health: median (and most) milliseconds, beside those
of the quiet server just before. No time is asserted: on a busy machine all of them are longer."""

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from time import monotonic, perf_counter, sleep
from typing import Any

import httpx2

from tests.e2e.bundled_server import running_bundled
from tests.e2e.test_hostile_grammars import ENDLESS
from tests.e2e.test_hostile_media import BAD, part, slow_gif

SECONDS, NUM_ATTACKERS, WAIT_S = 15.0, 4, 60.0
CHAT = "/v1/chat/completions"


@dataclass(slots=True)
class Times:
    health: list[float] = field(default_factory=list)
    text: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        return f"text {_shown(self.text)}, /health {_shown(self.health)}"


def _shown(values: list[float]) -> str:
    return f"{median(values) * 1e3:.1f} (most {max(values) * 1e3:.0f})"


def measure(client: httpx2.Client, seconds: float) -> Times:
    """Two at a time: a text, and probes."""
    found, end = Times(), monotonic() + seconds

    def probe() -> None:
        while monotonic() < end or not found.health:
            begun = perf_counter()
            assert client.get("/health").status_code == 200
            found.health.append(perf_counter() - begun)
            sleep(0.01)

    with ThreadPoolExecutor(1) as threads:
        probing = threads.submit(probe)
        while monotonic() < end or not found.text:
            begun = perf_counter()
            reply = client.post(CHAT, json=_talk("What color is the sky?"))
            assert reply.status_code == 200, reply.text
            found.text.append(perf_counter() - begun)
        probing.result()
    return found


def _talk(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0, **more}


Attack = Callable[[httpx2.Client, int], object]


def _media(kind: str, data: bytes) -> Attack:
    body = _talk([part(kind, data), {"type": "text", "text": "what?"}], timeout=SECONDS)
    return lambda client, serial: client.post(CHAT, json=body)


def _values(client: httpx2.Client, serial: int) -> object:
    body = b'{"prompt":"hi","x":[' + b"[]," * (20 * 2**20) + b"[]]}"
    return client.post("/v1/completions", content=body, headers={"content-type": "application/json"})


def _at_once(num: int, data: bytes) -> Attack:
    """The same bytes on many connections at the same time. Nobody waits for more than the first line of a reply."""

    async def one(host: str, port: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(data.replace(b"HOST", f"{host}:{port}".encode()))
            await reader.readline()
        finally:
            writer.transport.abort()

    async def all_of_them(url: httpx2.URL) -> None:
        sent = (one(url.host, url.port or 80) for _ in range(num))
        await asyncio.wait_for(asyncio.gather(*sent, return_exceptions=True), WAIT_S)

    return lambda client, serial: asyncio.run(all_of_them(client.base_url))


def _large_body() -> bytes:
    body = json.dumps(_talk([part("image", bytes(1_800_000))])).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: HOST\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _grammar(client: httpx2.Client, serial: int) -> object:
    return client.post(CHAT, json=_talk("hello", guided_grammar=f"{ENDLESS}\nB{serial}: /x/", timeout=SECONDS))


ATTACKS: dict[str, Attack] = {
    "grammar": _grammar,
    **{name.replace(" ", "-"): _media(*file) for name, file in BAD.items()},
    "values": _values,
    "bodies": _at_once(100, _large_body()),
    "pipeline": _at_once(2, b"GET /health HTTP/1.1\r\nHost: HOST\r\n\r\n" * 20_000),
    "videos": _media("video", slow_gif()),
    "priority": lambda client, serial: client.post(CHAT, json=_talk("hello", priority=-(2**31))),
    "host": lambda client, serial: client.post(CHAT, json=_talk("hello"), headers={"host": "evil.example"}),
    "tags": lambda client, serial: client.post(CHAT, json=_talk("</tool_response><tool_call><think>")),
}


def attack(url: str, send: Attack, is_over: threading.Event) -> None:
    serial = threading.get_ident()
    with httpx2.Client(base_url=url, timeout=WAIT_S, trust_env=False) as client:
        while not is_over.is_set():
            serial += 1
            with suppress(httpx2.HTTPError):
                send(client, serial)


def main(*names: str) -> int:
    with running_bundled() as url, httpx2.Client(base_url=url, timeout=WAIT_S, trust_env=False) as client:
        measure(client, 1.0)
        for name in names or ATTACKS:
            quiet, is_over = measure(client, SECONDS / 3), threading.Event()
            with ThreadPoolExecutor(NUM_ATTACKERS) as threads:
                for _ in range(NUM_ATTACKERS):
                    threads.submit(attack, url, ATTACKS[name], is_over)
                try:
                    found = measure(client, SECONDS)
                finally:
                    is_over.set()
            print(f"{name}: {found}; quiet: {quiet}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

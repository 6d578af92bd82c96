"""The benchmark's client: sends prepared requests when they are due. Every request has an outcome, even if it fails."""

import asyncio
import gc
import json
import sys
from collections.abc import Callable, Coroutine, Sequence
from math import inf
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from saccade.bench.load.client_connection import Connection, ServerAddress
from saccade.bench.load.client_reply import Outcome, ReplyReader
from saccade.bench.load.load_settings import LoadSettings, TargetSettings

T = TypeVar("T")
ASK_S = 30.0
MAX_OPEN = 1024  # connections opened before the clock starts, at most


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on uvloop, the fastest event loop, which Windows does not have."""
    if sys.platform == "win32":
        return asyncio.run(work)
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


class Client:
    """Talks to one server over keep-alive connections. Bound to one event loop; must be closed."""

    def __init__(self, target: TargetSettings) -> None:
        self.target = target
        self.address = ServerAddress.of(target.url)
        self._headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
        self._idle: list[Connection] = []

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *exception: object) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # lets the transports close

    async def open(self, count: int) -> None:
        """Opens connections until `count` are idle, so that no request waits for one. Where that fails, requests try
        again and say why."""
        self._idle = [connection for connection in self._idle if connection.is_usable]
        fresh = (Connection.open(self.address) for _ in range(count - len(self._idle)))
        found = await asyncio.gather(*fresh, return_exceptions=True)
        self._idle += [connection for connection in found if isinstance(connection, Connection)]

    def prepare(self, body: bytes, path: str = "") -> bytes:
        return self.address.request("POST", path or self.target.path, body, self._headers)

    async def send(self, request: bytes, index: int = 0, clock_at: float = 0.0) -> Outcome:
        """Sends one request and reads the whole reply. A failure is an outcome, not an exception."""
        reader = ReplyReader()
        failure = None
        try:
            async with asyncio.timeout(self.target.request_timeout_s):
                await self._exchange(request, reader)
        except TimeoutError:
            failure = "timeout", f"no end after {self.target.request_timeout_s:g} s"
        except OSError as error:
            failure = reader.lost(), str(error)
        return reader.outcome(index, clock_at, failure)

    async def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """Sends a request that is not part of the load, and returns the reply's status and body."""
        reader = ReplyReader()
        data = json.dumps(body).encode() if body is not None else None
        async with asyncio.timeout(ASK_S):
            await self._exchange(self.address.request(method, path, data, self._headers), reader)
        return reader.status, reader.data

    async def _exchange(self, request: bytes, reader: ReplyReader) -> None:
        """Uses an idle connection or a new one. If the server has closed the idle one, a new one replaces it, and the
        clock keeps running."""
        if (idle := self._take_idle()) is not None:
            try:
                await self._exchange_on(idle, request, reader)
                return
            except ConnectionError:
                if reader.status:
                    raise
        await self._exchange_on(await Connection.open(self.address), request, reader)

    async def exchange_once(self, request: bytes, reader: ReplyReader) -> None:
        """Sends a request only once, even if the connection was closed meanwhile."""
        await self._exchange_on(self._take_idle() or await Connection.open(self.address), request, reader)

    def _take_idle(self) -> Connection | None:
        while self._idle:
            if (connection := self._idle.pop()).is_usable:
                return connection
        return None

    async def _exchange_on(self, connection: Connection, request: bytes, reader: ReplyReader) -> None:
        await connection.exchange(request, reader)
        if connection.is_usable:
            self._idle.append(connection)
        else:
            connection.close()


async def drive(
    client: Client,
    requests: Sequence[bytes],
    load: LoadSettings,
    *,
    seed: int = 0,
    progress: Callable[[Outcome], None] = lambda outcome: None,
) -> tuple[list[Outcome], float]:
    """Sends all requests. Returns their outcomes in order, and the seconds from the first send to the last reply."""
    most = load.max_concurrency or len(requests)
    places = asyncio.Semaphore(most)
    due = arrivals(len(requests), load, seed)
    await client.open(min(most, len(requests), MAX_OPEN))
    gc.collect()
    gc.freeze()  # collecting the many long-lived request bodies again and again would stall the client
    clock_at = perf_counter()

    async def send(index: int) -> Outcome:
        async with places:
            outcome = await client.send(requests[index], index, clock_at)
        progress(outcome)
        return outcome

    tasks = []
    for index, due_s in enumerate(due):
        if (wait_s := clock_at + due_s - perf_counter()) > 0:
            await asyncio.sleep(wait_s)
        tasks.append(asyncio.create_task(send(index)))
    outcomes = list(await asyncio.gather(*tasks))
    return outcomes, perf_counter() - clock_at


def arrivals(count: int, load: LoadSettings, seed: int) -> list[float]:
    """Seconds at which requests are due. Gaps follow a gamma distribution with mean 1 / rate."""
    if load.request_rate == inf:
        return [0.0] * count
    scale = 1 / (load.request_rate * load.burstiness)
    gaps = np.random.default_rng(seed).gamma(load.burstiness, scale, count)
    return [0.0, *np.cumsum(gaps[1:]).tolist()]

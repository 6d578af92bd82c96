"""Sends prepared requests when they are due, and no faster than concurrency allows."""

import asyncio
import gc
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from saccade.bench.client import Client
from saccade.bench.client_reply import Outcome
from saccade.bench.serving_settings import LoadSettings

T = TypeVar("T")
MOST_OPEN = 1024  # connections opened before the clock starts


def run(work: Coroutine[Any, Any, T]) -> T:
    """On the fastest event loop there is."""
    if sys.platform == "win32":
        return asyncio.run(work)
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def drive(
    client: Client,
    requests: Sequence[bytes],
    load: LoadSettings,
    *,
    seed: int = 0,
    progress: Callable[[Outcome], None] = lambda outcome: None,
) -> tuple[list[Outcome], float]:
    """The outcome of every request, in their order, and the seconds from the first send to the last end."""
    most = load.max_concurrency or len(requests)
    places = asyncio.Semaphore(most)
    due = arrivals(len(requests), load, seed)
    await client.open(min(most, len(requests), MOST_OPEN))
    with _without_collections():
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
    """Seconds at which requests are due: gaps of a gamma distribution whose mean is one over the rate."""
    if load.request_rate == inf:
        return [0.0] * count
    scale = 1 / (load.request_rate * load.burstiness)
    gaps = np.random.default_rng(seed).gamma(load.burstiness, scale, count)
    return [0.0, *np.cumsum(gaps[1:]).tolist()]


@contextmanager
def _without_collections() -> Iterator[None]:
    """Request bodies are many and live to the end: looking through them again and again would stall the client."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()

"""Replicas of the bundled model under load: right answers, caches, losses, updates, scaling."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import pytest

from tests.e2e.known import Question, cache_hits, repeated
from tests.e2e.process import children_of
from tests.ray.running import RunningCluster, Streams

NUM_PICTURES, TIMES = 25, 8
SETTINGS: dict[str, Any] = {"replica_cpus": 1, "ingress_cpus": 3, "health_period_s": 1, "shutdown_timeout_s": 120}


@pytest.fixture(scope="module")
def three(nodes: RunningCluster) -> RunningCluster:
    nodes.deploy(replicas=3, **SETTINGS)
    nodes.wait_running(3)
    return nodes


def hit_rates(nodes: RunningCluster, questions: list[Question], at_a_time: int) -> dict[str, float]:
    """The cache hit rates of pictures and of prompt tokens. All answers must be right."""

    async def ask_all() -> list[bool]:
        limit = asyncio.Semaphore(at_a_time)
        async with nodes.async_client() as client:

            async def ask(question: Question) -> bool:
                async with limit:
                    return await question.ask(client)

            return await asyncio.gather(*map(ask, questions))

    with nodes.client() as client:
        before = cache_hits(client.get("/metrics").text)
        assert all(asyncio.run(ask_all())), "a wrong answer"
        after = cache_hits(client.get("/metrics").text)
    found = {name: after[name] - before[name] for name in after}
    encoded = found["mm_cache_queries"] - found["mm_cache_hits"]
    return {
        "pictures": 1 - encoded / len(questions),
        "tokens": found["prefix_cache_hits"] / found["prefix_cache_queries"],
    }


def test_two_hundred_concurrent_requests_are_answered_correctly(three: RunningCluster) -> None:
    print("200 at once, 3 replicas:", hit_rates(three, repeated(NUM_PICTURES, TIMES, int(time.time())), 200))


def test_affinity_uses_caches_like_a_single_replica_and_round_robin_does_not(nodes: RunningCluster) -> None:
    found = {}
    for name, replicas, routing in (
        ("one replica", 1, "affinity"),
        ("affinity", 3, "affinity"),
        ("round robin", 3, "round-robin"),
    ):
        nodes.deploy(**SETTINGS, replicas=replicas, routing=routing)
        nodes.wait_running(replicas)
        found[name] = hit_rates(nodes, repeated(NUM_PICTURES, TIMES, int(time.time())), 8)
        print(name, found[name])
    for what in ("pictures", "tokens"):
        assert found["affinity"][what] >= 0.9 * found["one replica"][what], found
        assert found["round robin"][what] < found["affinity"][what], found


def test_killing_a_node_ends_only_its_streams(three: RunningCluster) -> None:
    three.deploy(replicas=3, **SETTINGS)
    three.wait_running(3)
    streams = Streams(9, 400)

    async def kill_node() -> list[tuple[int, str]]:
        async with three.async_client() as client:
            return await streams.run(client, lambda: three.tell("kill_node"))

    streams.check(asyncio.run(kill_node()))
    three.tell("add_node")
    three.wait_running(3)
    hit_rates(three, repeated(6, 2, int(time.time())), 4)


def test_a_replica_whose_engine_dies_fails_its_health_check_and_both_are_replaced(three: RunningCluster) -> None:
    three.deploy(replicas=3, **SETTINGS)
    three.wait_running(3)
    victim = three.replica_pids()[0]
    [worker] = children_of(victim, "saccade.execution.worker_start")
    streams = Streams(9, 400)

    async def kill_worker() -> list[tuple[int, str]]:
        async with three.async_client() as client:
            return await streams.run(client, lambda: os.kill(worker, signal.SIGKILL))

    streams.check(asyncio.run(kill_worker()))

    def wait_replaced() -> None:
        three.wait_for(lambda: victim not in three.replica_pids(), "the end of a replica without an engine")
        three.wait_running(3)

    assert asyncio.run(under_load(three, wait_replaced, 4)) > 0, "requests go to others meanwhile"


def test_an_update_under_load_fails_no_request(three: RunningCluster) -> None:
    three.deploy(replicas=3, **SETTINGS)
    three.wait_running(3)
    before = three.replica_pids()

    def update() -> None:
        three.deploy(replicas=3, max_queued_requests=1000, **SETTINGS)
        three.wait_running(3)

    num_right = asyncio.run(under_load(three, update, 4))
    print("answers during an update:", num_right)
    assert not {*before} & {*three.replica_pids()}, "all replicas are new"
    assert num_right > 20


def test_the_number_of_replicas_follows_a_step_in_load(nodes: RunningCluster) -> None:
    scaling = {"target_tokens": 400, "look_back_s": 2, "upscale_delay_s": 1, "downscale_delay_s": 3}
    nodes.deploy(replicas=1, max_replicas=3, **scaling, **SETTINGS)
    nodes.wait_running(1)
    asyncio.run(under_load(nodes, lambda: nodes.wait_running(3), 24))
    nodes.wait_running(1)


async def under_load(nodes: RunningCluster, work: Callable[[], None], at_a_time: int) -> int:
    """Does some work under constant load. All requests must be answered correctly; returns their number."""
    is_over, pick = asyncio.Event(), Random()
    questions = [Question(number) for number in range(12)]

    async def ask_on(client: Any) -> int:
        count = 0
        while not is_over.is_set():
            assert await pick.choice(questions).ask(client), "a wrong answer"
            count += 1
        return count

    async with nodes.async_client() as client:
        callers: list[Awaitable[int]] = [asyncio.create_task(ask_on(client)) for _ in range(at_a_time)]
        try:
            await asyncio.to_thread(work)
        finally:
            is_over.set()
            counts = await asyncio.gather(*callers)
    return sum(counts)

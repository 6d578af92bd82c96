"""Two engines of the bundled model behind one front end: caches that are used, and an engine that is killed."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import orjson
import pytest

from saccade import bundled
from tests.e2e.known import BUNDLED, Question, check_that_repeated_images_are_found
from tests.e2e.process import END_S, ServerProcess, children_of, running

WORKER = "saccade.execution.worker_start"
NUM_STREAMS, NUM_TOKENS = 6, 300  # no engine takes more than four of six, so that all run at once


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("replicas") / "log"
    with running(bundled.path(), log, server={"data_parallel_size": 2}, **BUNDLED) as server:
        server.wait_ready()
        yield server


def test_repeated_images_are_found_where_they_were_encoded(pair: ServerProcess) -> None:
    asking = httpx2.AsyncClient(base_url=pair.url, timeout=END_S, trust_env=False)
    with pair.client() as client:
        check_that_repeated_images_are_found(client, asking)
        assert set(client.get("/graphs").json()["engines"]) == {"0", "1"}
        assert 'saccade:num_requests_running{engine="1"' in client.get("/metrics").text


def test_killing_an_engine_fails_only_its_streams_and_it_comes_back(pair: ServerProcess) -> None:
    begun = set[int]()

    async def stream(client: httpx2.AsyncClient, number: int) -> tuple[int, int, str]:
        """Tokens that came, tokens that usage tells of, and how the stream ended."""
        body = {
            "prompt": f"{number} {time.time()}: once upon a time",
            "max_tokens": NUM_TOKENS,
            "stream": True,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }
        num_tokens, told, end = 0, 0, "cut off"
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            assert reply.status_code == 200, await reply.aread()
            async for event in events(reply):
                if "error" in event:
                    return num_tokens, told, event["error"]["code"]
                begun.add(number)
                for choice in event["choices"]:
                    num_tokens += len(choice.get("token_ids") or ())
                    end = choice["finish_reason"] or end
                told = (event.get("usage") or {}).get("completion_tokens", told)
        return num_tokens, told, end

    async def kill_one() -> list[tuple[int, int, str]]:
        async with httpx2.AsyncClient(base_url=pair.url, timeout=END_S, trust_env=False) as client:
            streams = [asyncio.create_task(stream(client, number)) for number in range(NUM_STREAMS)]
            while len(begun) < NUM_STREAMS or not await both_run(client):
                await asyncio.sleep(0.01)
                assert not all(task.done() for task in streams), [task.result() for task in streams]
            os.kill(children_of(pair.popen.pid, WORKER)[0], signal.SIGKILL)
            return await asyncio.gather(*streams)

    workers = children_of(pair.popen.pid, WORKER)
    ends = asyncio.run(kill_one())
    whole = [end for end in ends if end[2] != "engine_dead"]
    assert 0 < len(whole) < NUM_STREAMS, ends
    assert whole == [(NUM_TOKENS, NUM_TOKENS, "length")] * len(whole), "answered once, and to the end"
    with pair.client() as client:
        end = time.monotonic() + END_S
        while client.get("/health").json()["status"] != "ok":
            assert time.monotonic() < end, pair.text
            time.sleep(0.1)
        assert 'saccade:num_requests_running{engine="0"' in client.get("/metrics").text
    now = children_of(pair.popen.pid, WORKER)
    assert len(now) == 2 and len({*now, *workers}) == 3, "one of them is new"
    asyncio.run(_ask_some(pair))


async def _ask_some(pair: ServerProcess) -> None:
    async with httpx2.AsyncClient(base_url=pair.url, timeout=END_S, trust_env=False) as client:
        assert all(await asyncio.gather(*(Question(number).ask(client) for number in range(6))))


async def both_run(client: httpx2.AsyncClient) -> bool:
    lines = (await client.get("/metrics")).text.splitlines()
    found = [line.split() for line in lines if line.startswith("saccade:num_requests_running{")]
    return len(found) == 2 and all(float(value) > 0 for _, value in found)


async def events(reply: httpx2.Response) -> Any:
    async for line in reply.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield orjson.loads(line[6:])

"""Two replicas of the bundled model on a Ray cluster of two node processes, through the front end's own HTTP."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from tests.e2e.known import BLOCK, Question, check_that_repeated_images_are_found
from tests.ray.running import RunningCluster, Streams, cluster

SETTINGS = f"""
replicas: 2
replica-cpus: 2
ingress-cpus: 3
health-period-s: 1
block-size: {BLOCK}
api-key: [sesame]
admin-api-key: boss
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    with cluster(tmp_path_factory.mktemp("ray") / "log") as found:
        config = tmp_path_factory.mktemp("config") / "settings.yaml"
        config.write_text(SETTINGS)
        found.deploy_by_command(config, ["sesame"])
        found.wait_running(2)
        yield found


def test_repeated_images_are_found_where_they_were_encoded(pair: RunningCluster) -> None:
    with pair.client() as client:
        check_that_repeated_images_are_found(client, pair.async_client())
        assert len(client.get("/graphs").json()["engines"]) == 2


def test_vectors_cross_the_cluster(pair: RunningCluster) -> None:
    with pair.client() as client:
        found = client.post("/v1/embeddings", json={"input": ["a red heart", "a green circle"]}).json()["data"]
    assert len(found) == 2 and all(abs(sum(x * x for x in one["embedding"]) - 1) < 1e-3 for one in found)
    assert found[0]["embedding"] != found[1]["embedding"]


def test_errors_and_keys_work_as_on_a_server(pair: RunningCluster) -> None:
    with pair.client() as client:
        talk = {"messages": [{"role": "user", "content": "word " * 5000}]}
        for path, body, status, code in (
            ("/v1/chat/completions", talk, 400, "context_length_exceeded"),
            ("/v1/chat/completions", {"messages": []}, 400, "invalid_messages"),
            ("/v1/chat/completions", Question(1).body(model="other"), 404, "model_not_found"),
            ("/nowhere", {}, 404, "unknown_route"),
        ):
            reply = client.post(path, json=body)
            assert (reply.status_code, reply.json()["error"]["code"]) == (status, code), reply.text
        assert client.get("/health").json() == {"status": "ok"}
        client.headers.pop("authorization")
        reply = client.post("/v1/chat/completions", json=talk)
        assert (reply.status_code, reply.json()["error"]["type"]) == (401, "authentication_error")


def test_several_prompts_of_one_request_are_all_answered(pair: RunningCluster) -> None:
    with pair.client() as client:
        body = {"prompt": [f"number {i}" for i in range(5)], "max_tokens": 3, "ignore_eos": True, "n": 2}
        reply = client.post("/v1/completions", json=body).json()
    assert [choice["index"] for choice in reply["choices"]] == list(range(10))
    assert reply["usage"]["completion_tokens"] == 30


def test_a_request_ends_when_its_client_leaves(pair: RunningCluster) -> None:
    async def leave() -> None:
        async with pair.async_client() as client:
            body = {"prompt": "on and on", "max_tokens": 900, "stream": True, "ignore_eos": True}
            async with client.stream("POST", "/v1/completions", json=body) as reply:
                await anext(reply.aiter_lines())

    asyncio.run(leave())
    pair.wait_idle()


def test_killing_a_replica_fails_only_its_streams_and_it_is_replaced(pair: RunningCluster) -> None:
    victims = pair.replica_pids()
    assert len(victims) == 2
    streams = Streams(6, 300)

    async def kill_one() -> list[tuple[int, str]]:
        async with pair.async_client() as client:
            return await streams.run(client, lambda: os.kill(victims[0], signal.SIGKILL))

    streams.check(asyncio.run(kill_one()))
    pair.wait_for(lambda: len({*pair.replica_pids()} - {victims[0]}) == 2, "another replica")
    pair.wait_running(2)

    async def ask_some() -> list[bool]:
        async with pair.async_client() as client:
            return await asyncio.gather(*(Question(number).ask(client) for number in range(6)))

    assert all(asyncio.run(ask_some()))

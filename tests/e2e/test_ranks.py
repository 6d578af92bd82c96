"""Real servers with one, two and four ranks and graphs: the same answers, and an orderly end."""

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx2
import pytest

from tests.child_processes import gone
from tests.e2e.checkpoint import make_checkpoint
from tests.e2e.conftest import wait_idle
from tests.e2e.metrics import gauges
from tests.e2e.pictures import asked, encoded, image_part, picture
from tests.e2e.process import END_S, ServerProcess, running
from tests.e2e.test_lifecycle import Streaming, paused, wait_for
from tests.execution.alike import CLOSE, assert_close

ENGINE = {"graphs": "", "kv_cache_tokens": 208, "encoder_cache_tokens": 64, "verify": "off"}
LIMITS = {
    "max_num_seqs": 3,
    "max_num_batched_tokens": 32,
    "max_model_len": 200,
    "encoder_budget_tokens": 32,
    "prefill_chunk_tokens": 16,
}
SCORED = {"temperature": 0, "max_tokens": 10, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
PICTURES = [image_part(encoded(picture(seed, (20 + 4 * seed, 24)))) for seed in range(3)]
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2, 3]}},
            "required": ["ok", "n"],
            "additionalProperties": False,
        },
    },
}
LONG_TEXT = "the quick brown fox and the lazy dog " * 2
CASES: dict[str, dict[str, Any]] = {
    "text": {"messages": asked(text="hello there")},
    "an image": {"messages": asked(PICTURES[0])},
    "two images in chunks": {"messages": asked(PICTURES[1], PICTURES[2], text=LONG_TEXT)},
    "the same prompt again": {"messages": asked(PICTURES[1], PICTURES[2], text=LONG_TEXT)},
    "a seed": {"messages": asked(text="hello"), "temperature": 0.9, "top_k": 20, "top_p": 0.95, "seed": 11, "n": 2},
    "penalties": {"messages": asked(text="hello"), "repetition_penalty": 1.4, "frequency_penalty": 0.5},
    "a bias": {"messages": asked(text="hello"), "logit_bias": {"40": 5, "41": -100}},
    "a schema": {"messages": asked(PICTURES[0]), "response_format": SCHEMA, "max_tokens": 40, "ignore_eos": False},
    "a choice": {"messages": asked(text="yes?"), "guided_choice": ["yes", "no", "perhaps"], "ignore_eos": False},
}
# Together they have more tokens than the cache holds.
CROWD = {f"one of {i}": {"messages": asked(text=f"{i} {LONG_TEXT}"), "max_tokens": 32} for i in range(3)}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, ServerProcess]]:
    """By the number of their ranks. They start side by side."""
    folder = make_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["num_heads"] = 4  # of the same weights, so that four ranks have one each
    (folder / "config.json").write_text(json.dumps(config))
    logs = tmp_path_factory.mktemp("logs")
    with ExitStack() as stack:
        found = {}
        for size in (1, 2, 4):
            engine = {**ENGINE, "tensor_parallel_size": size}
            started = running(
                folder, logs / f"{size}", engine=engine, limits=LIMITS, server={"shutdown_timeout_s": END_S}
            )
            found[size] = stack.enter_context(started)
        for server in found.values():
            server.wait_ready()
        yield found


@pytest.fixture(scope="module")
def replies(servers: dict[int, ServerProcess]) -> dict[int, dict[str, Any]]:
    """Each server is asked everything in the same order, all of them at once."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(servers, pool.map(ask_all, servers.values()), strict=True))


def ask_all(server: ServerProcess) -> dict[str, Any]:
    with server.client() as client:
        return {name: ask(client, body) for name, body in CASES.items()} | ask_crowd(server)


def ask_crowd(server: ServerProcess) -> dict[str, Any]:
    """All at once, and one more that leaves in the middle. They meet, however long it takes to send them."""
    with server.client() as client, ThreadPoolExecutor(1 + len(CROWD)) as pool:
        with paused(server.engine_pid()):
            leaving = pool.submit(leave_early, server, {**SCORED, "max_tokens": 60, "messages": asked(PICTURES[0])})
            crowd = {name: pool.submit(ask, client, body) for name, body in CROWD.items()}
            wait_for(lambda: client.get("/load").json()["server_load"] == 1 + len(CROWD))
        found = {name: reply.result(END_S) for name, reply in crowd.items()}
        leaving.result(END_S)
        wait_idle(client)
    return found


def ask(client: httpx2.Client, body: dict[str, Any]) -> Any:
    reply = client.post("/v1/chat/completions", json=SCORED | body)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("case", [*CASES, *CROWD])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_answer_as_one_does(replies: dict[int, dict[str, Any]], size: int, case: str) -> None:
    found, expected = replies[size][case], replies[1][case]
    assert found["usage"] == expected["usage"]
    for mine, right in zip(found["choices"], expected["choices"], strict=True):
        assert mine["finish_reason"] == right["finish_reason"]
        assert_same_scores(mine["logprobs"]["content"], right["logprobs"]["content"])
        assert mine["message"] == right["message"]


def assert_same_scores(found: list[Any], expected: list[Any]) -> None:
    """Tokens, and log-probabilities of the likeliest 20."""
    assert [each["token"] for each in found] == [each["token"] for each in expected]
    for mine, right in zip(found, expected, strict=True):
        assert abs(mine["logprob"] - right["logprob"]) < CLOSE
        assert len(right["top_logprobs"]) == 20
        assert_close(
            *(dict(enumerate(sorted(top["logprob"] for top in each["top_logprobs"]))) for each in (mine, right))
        )


@pytest.mark.parametrize("size", [2, 4])
def test_a_stream_of_ranks_is_the_plain_answer_in_pieces(
    servers: dict[int, ServerProcess], replies: dict[int, dict[str, Any]], size: int
) -> None:
    stream = Streaming(servers[size], SCORED | CASES["an image"])
    stream.join(END_S)
    assert stream.events[-1] == "[DONE]"
    pieces = [choice["delta"].get("content") or "" for event in stream.events[:-1] for choice in event["choices"]]
    assert len(pieces) > 2 and "".join(pieces) == replies[1]["an image"]["choices"][0]["message"]["content"]


@pytest.mark.parametrize("size", [2, 4])
def test_requests_were_put_back_found_again_and_replayed(
    servers: dict[int, ServerProcess], replies: dict[int, dict[str, Any]], size: int
) -> None:
    """What the answers above must have met; and when all is over, they still come."""
    with servers[size].client() as client:
        seen = gauges(client.get("/metrics").text)
        phases = client.get("/graphs").json()["phases"]
        again = ask(client, CASES["an image"])
    for name in ("num_preemptions", "prefix_cache_hits", "mm_cache_hits"):
        assert seen[f"saccade:{name}_total"] > 0, name
    assert {phase["phase"] for phase in phases if sum(phase["replays"].values())} >= {"vision", "prefill", "decode"}
    assert again["choices"][0]["message"] == replies[1]["an image"]["choices"][0]["message"]


def leave_early(server: ServerProcess, body: dict[str, Any]) -> None:
    with (
        server.client() as client,
        client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as reply,
    ):
        for _, part in zip(range(3), reply.iter_bytes(), strict=False):
            assert part


@pytest.mark.parametrize(("size", "number"), [(2, signal.SIGTERM), (4, signal.SIGINT)])
def test_a_signal_ends_all_ranks_in_order(servers: dict[int, ServerProcess], size: int, number: signal.Signals) -> None:
    """What runs is answered before. The last test: the server is gone behind it."""
    server = servers[size]
    pids = [server.engine_pid(), *server.rank_pids()]
    assert len(pids) == size
    stream = Streaming(server, {**SCORED, "max_tokens": 60, "messages": asked(text="hello")})
    wait_for(lambda: len(stream.lines) > 2)
    server.signal(number)
    stream.join(END_S)
    assert stream.events[-1] == "[DONE]" and stream.events[-2]["choices"][0]["finish_reason"] == "length"
    assert server.wait() == 0 and "Traceback" not in server.text and "died" not in server.text
    wait_for(lambda: all(map(gone, pids)))

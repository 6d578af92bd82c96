"""A grammar that would never be compiled is refused; structured output of others goes on, and so does the engine."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest

from saccade.jobs.packets import resident_bytes
from tests.child_processes import gone
from tests.e2e.conftest import wait_idle
from tests.e2e.process import ServerProcess, children_of, running

CHAT = "/v1/chat/completions"
ENDLESS = "start: A\nA: /.*a.{16}.*/ & /.*b.{16}.*/ & ~/.*c.{16}.*/"
TRIALS = "saccade.scheduling.trial_process"


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running(checkpoint, tmp_path_factory.mktemp("grammars") / "log") as found:
        found.wait_ready()
        yield found


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx2.Client]:
    with server.client() as client:
        ask_choice(client)
        yield client
        ask_choice(client)
        wait_idle(client)


def ask(client: httpx2.Client, **more: Any) -> httpx2.Response:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}
    return client.post(CHAT, json=body | more)


def ask_choice(client: httpx2.Client) -> None:
    reply = ask(client, guided_choice=["a", "b"])
    assert reply.status_code == 200 and reply.json()["choices"][0]["message"]["content"] in ("a", "b"), reply.text


def ask_integer(client: httpx2.Client, least: int) -> None:
    """A schema that nobody sent before."""
    schema = {"type": "integer", "minimum": least, "maximum": least + 5}
    shape = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    reply = ask(client, response_format=shape)
    assert reply.status_code == 200, reply.text
    assert least <= orjson.loads(reply.json()["choices"][0]["message"]["content"]) <= least + 5


def test_an_endless_grammar_ends_alone(server: ServerProcess, http: httpx2.Client) -> None:
    ask_integer(http, 0)
    engine = server.engine_pid()
    before = resident_bytes(engine), resident_bytes(server.popen.pid)
    with ThreadPoolExecutor(3) as threads:
        endless = [threads.submit(ask, http, guided_grammar=f"{ENDLESS}\nB{i}: /x/", timeout=120) for i in range(2)]
        for i in range(1, 6):
            ask_integer(http, 10 * i)
            ask_choice(http)
        assert not all(reply.done() for reply in endless), "new schemas do not wait for it"
        for reply in (future.result() for future in endless):
            assert reply.status_code == 400, reply.text
            error = reply.json()["error"]
            assert error["param"] == "guided_grammar" and "CPU time" in error["message"], error
    assert server.engine_pid() == engine
    after = resident_bytes(engine), resident_bytes(server.popen.pid)
    assert all(now - then < 64 * 2**20 for now, then in zip(after, before, strict=True)), (before, after)


def test_a_deadline_ends_the_trial(server: ServerProcess, http: httpx2.Client) -> None:
    """The reply comes in time, and the process that tried the grammar is gone."""
    pids = set(children_of(server.engine_pid(), TRIALS))
    for timeout_s in (0.5, 1.0, 1.5):  # on a busy machine the trial may not have begun by then
        reply = ask(http, guided_grammar=f"{ENDLESS}\nC: /y/", timeout=timeout_s)
        assert reply.status_code == 408, reply.text
        if is_one_gone(server, pids):
            break
    else:
        pytest.fail("no trial was ended")
    ask_integer(http, 1000)


def is_one_gone(server: ServerProcess, pids: set[int]) -> bool:
    """Within the time that a busy machine takes to kill a process."""
    deadline = time.monotonic() + 30
    while pids <= set(children_of(server.engine_pid(), TRIALS)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_no_trial_outlives_its_server(checkpoint: Path, tmp_path: Path) -> None:
    with running(checkpoint, tmp_path / "log") as server:
        server.wait_ready()
        pids = children_of(server.engine_pid(), TRIALS)
        assert pids
    deadline = time.monotonic() + 60
    while not all(map(gone, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)

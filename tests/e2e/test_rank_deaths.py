"""Servers of two ranks that lose one, or their front end: one reason for all, and no process is left."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from tests.child_processes import gone
from tests.e2e.process import END_S, ServerProcess, running
from tests.e2e.test_lifecycle import HELLO, LONG, Streaming, wait_for

WATCHDOG_S = 10.0
DEAD_S = 60.0  # more than a busy machine takes for a few requests; tests/e2e/test_lifecycle.py waits for such an end
PATH = "/v1/chat/completions"


@contextmanager
def two_ranks(checkpoint: Path, log: Path) -> Iterator[tuple[ServerProcess, list[int]]]:
    """A server that streams, and the processes behind it, which must be gone at the end."""
    engine = {"tensor_parallel_size": 2, "watchdog_timeout_s": WATCHDOG_S, "enforce_eager": True, "graphs": ""}
    with running(checkpoint, log, engine=engine, server={"dead_engine_s": DEAD_S}) as server:
        server.wait_ready()
        pids = [server.engine_pid(), *server.rank_pids()]
        assert len(pids) == 2
        yield server, pids
    assert all(map(gone, pids))


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGKILL, "rank 1 of 2 was ended by SIGKILL"),
        (signal.SIGSTOP, "rank 1 of 2 has not answered for 8 s"),
    ],
)
def test_a_rank_that_is_killed_or_stopped(
    checkpoint: Path, tmp_path: Path, number: signal.Signals, reason: str
) -> None:
    """In the middle of a stream. A stopped one is noticed before the front end gives the whole engine up."""
    with two_ranks(checkpoint, tmp_path / "log") as (server, pids), server.client() as client:
        stream = Streaming(server, {**LONG, "max_tokens": 450})
        wait_for(lambda: len(stream.lines) > 2)
        begun = time.monotonic()
        os.kill(pids[1], number)
        stream.join(END_S)
        assert time.monotonic() - begun < WATCHDOG_S + 30, "on a busy machine"
        told = f"the engine died: {reason}; its requests are lost, and it must be restarted"
        assert stream.events[-1] == "[DONE]"
        assert stream.events[-2]["error"] == {
            "message": told,
            "type": "overloaded_error",
            "param": None,
            "code": "engine_dead",
        }
        for reply in (client.get("/health"), client.get("/ready"), client.post(PATH, json={"messages": HELLO})):
            assert reply.status_code == 503 and reply.json()["error"]["message"] == told
        server.signal(signal.SIGTERM)
        assert server.wait() == 1
        assert reason in " ".join(server.text.split())


def test_a_rank_that_is_killed_while_requests_drain(checkpoint: Path, tmp_path: Path) -> None:
    """They are lost, and the client, the log and the exit code say why, as they do before the server is told to end."""
    reason = "the engine died: rank 1 of 2 was ended by SIGKILL; its requests are lost"
    with two_ranks(checkpoint, tmp_path / "log") as (server, pids), server.client() as client:
        stream = Streaming(server, {**LONG, "max_tokens": 450})
        wait_for(lambda: len(stream.lines) > 2)
        server.signal(signal.SIGTERM)
        wait_for(lambda: client.get("/ready").status_code == 503)
        os.kill(pids[1], signal.SIGKILL)
        stream.join(END_S)
        assert reason in stream.events[-2]["error"]["message"]
        assert server.wait() == 1 and reason in " ".join(server.text.split())


def test_a_killed_front_end_leaves_no_process(checkpoint: Path, tmp_path: Path) -> None:
    with two_ranks(checkpoint, tmp_path / "log") as (server, pids):
        body = {**LONG, "max_tokens": 450, "stream": True}
        with server.client() as client, client.stream("POST", PATH, json=body) as reply:
            parts = reply.iter_bytes()
            assert next(parts) and next(parts)
            server.signal(signal.SIGKILL)
            with pytest.raises(httpx2.TransportError):
                list(parts)
        assert server.wait() == -signal.SIGKILL
        wait_for(lambda: all(map(gone, pids)))


def test_a_model_that_cannot_be_divided_is_one_sentence(checkpoint: Path, tmp_path: Path) -> None:
    with running(checkpoint, tmp_path / "log", engine={"tensor_parallel_size": 3}) as server:
        assert server.wait() == 2
        text = " ".join(server.text.split())
        assert "num_heads = 4 cannot be split evenly over 3 ranks" in text and "Traceback" not in text
        assert "rank 1" not in text, "it is said before others are started"

"""Start, full, drained, hurried, dead: the server says what it is, and every request gets an end."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from tests.e2e.process import END_S, START_S, ServerProcess, running

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
LONG = {"messages": HELLO, "max_tokens": 250, "ignore_eos": True, "temperature": 0}
LONGEST = LONG | {"max_tokens": 450}  # does not end by itself before it is ended


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + END_S
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.02)


class Streaming(threading.Thread):
    """A client that reads a stream to its end; `lines` grow as they come."""

    def __init__(self, server: ServerProcess, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.lines: list[str] = []
        self.raw = b""
        self._url, self._body = server.url, body | {"stream": True}
        self.start()

    def run(self) -> None:
        with (
            httpx2.Client(timeout=END_S, trust_env=False) as client,
            client.stream("POST", f"{self._url}/v1/chat/completions", json=self._body) as reply,
        ):
            for part in reply.iter_bytes():
                self.raw += part
                self.lines = self.raw.decode().split("\n\n")

    @property
    def events(self) -> list[Any]:
        """Every event must be whole: no half-written line, a JSON object or the end."""
        assert self.raw.endswith(b"\n\n")
        found = [line.removeprefix("data: ") for line in self.lines if line and not line.startswith(":")]
        return [line if line == "[DONE]" else json.loads(line) for line in found]


def test_a_server_lives_from_loading_to_a_drained_end(checkpoint: Path, tmp_path: Path) -> None:
    with running(checkpoint, tmp_path / "log") as server, server.client() as client:
        assert client.get("/health").status_code == 200
        early = client.get("/ready")
        if early.status_code != 200:  # on a fast machine it may be ready already
            assert early.status_code == 503 and early.json()["error"]["code"] == "starting"
            assert int(early.headers["retry-after"]) >= 1
        server.wait_ready()
        assert client.get("/ready").status_code == 200
        assert "loading weights" in server.text and "warming up" in server.text
        assert listening_ports(server.popen.pid, server.engine_pid()) == {int(server.url.rsplit(":", 1)[1])}
        engine, streams = server.engine_pid(), [Streaming(server, LONG) for _ in range(3)]
        wait_for(lambda: all(len(stream.lines) > 2 for stream in streams))
        with paused(engine):  # so that nothing ends before it was looked at
            num_open = sum(stream.is_alive() for stream in streams)
            streams.append(Streaming(server, LONG))  # if a busy machine let the others end, this one has not begun
            wait_for(lambda: client.get("/load").json()["server_load"] > num_open)
            server.signal(signal.SIGTERM)
            check_draining(client)
        for stream in streams:
            stream.join(END_S)
            assert stream.events[-1] == "[DONE]" and stream.events[-2]["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0 and "Traceback" not in server.text


def check_draining(client: httpx2.Client) -> None:
    wait_for(lambda: client.get("/ready").status_code == 503)
    assert client.get("/ready").json()["error"]["code"] == "shutting_down"
    assert client.get("/health").status_code == 200
    refused = client.post("/v1/chat/completions", json={"messages": HELLO})
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """The process does nothing meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def listening_ports(*pids: int) -> set[int]:
    """TCP ports on which any of the processes listens."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(str(link.readlink()))
            except OSError:
                continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(int(fields[1].rsplit(":", 1)[1], 16))
    return found


def test_requests_that_outlive_the_drain_are_told(checkpoint: Path, tmp_path: Path) -> None:
    """Time over ends streams with an error; so does a second signal, long before."""
    with running(checkpoint, tmp_path / "log", server={"shutdown_timeout_s": 10 * END_S}) as server:
        server.wait_ready()
        body = {**LONG, "n": 8, "max_tokens": 440, "messages": [{"role": "user", "content": "a" * 40}]}
        engine, streams = server.engine_pid(), [Streaming(server, body) for _ in range(4)]
        wait_for(lambda: any(len(stream.lines) > 2 for stream in streams))  # the engine takes them in any order
        with paused(engine), server.client() as client:
            server.signal(signal.SIGTERM)
            wait_for(lambda: client.get("/ready").status_code == 503)
            server.signal(signal.SIGTERM)
        assert server.wait() == 0
        for stream in streams:
            stream.join(END_S)
        begun_ones = [stream for stream in streams if stream.raw.startswith(b"data:")]
        assert begun_ones and all(stream.events[-1] == "[DONE]" for stream in begun_ones)
        assert {stream.events[-2]["error"]["code"] for stream in begun_ones} == {"shutting_down"}
        for stream in streams:  # what had not begun has a status of its own
            assert stream in begun_ones or json.loads(stream.raw)["error"]["code"] == "shutting_down"


def test_a_full_server_refuses_and_recovers_and_a_dead_one_says_so(checkpoint: Path, tmp_path: Path) -> None:
    limits = {"max_num_seqs": 2, "max_queued_requests": 3, "retry_after_s": 4}
    ends = {"dead_engine_s": 5}
    with running(checkpoint, tmp_path / "log", limits=limits, server=ends) as server, server.client() as client:
        server.wait_ready()
        with paused(server.engine_pid()):  # so that none ends before all are inside
            streams = [Streaming(server, LONG) for _ in range(5)]
            wait_for(lambda: client.get("/load").json()["server_load"] == 5)
            refused = client.post("/v1/chat/completions", json={"messages": HELLO})
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "queue_full"
            assert refused.headers["retry-after"] == "4"
        for stream in streams:
            stream.join(END_S)
            assert stream.events[-2]["choices"][0]["finish_reason"] == "length"
        wait_for(lambda: client.get("/load").json()["server_load"] == 0)
        assert client.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 1}).status_code == 200
        check_death(server, client)


def test_an_engine_that_died_is_started_again(checkpoint: Path, tmp_path: Path) -> None:
    """In the same process and on the same port; what it had is told so."""
    with running(checkpoint, tmp_path / "log", server={"restart_engine": True}) as server, server.client() as client:
        server.wait_ready()
        first, stream = server.engine_pid(), Streaming(server, LONGEST | {"n": 8})
        wait_for(lambda: len(stream.lines) > 2)
        os.kill(first, signal.SIGKILL)
        stream.join(END_S)
        assert stream.events[-2]["error"]["code"] == "engine_dead"
        assert "restarted" in stream.events[-2]["error"]["message"]
        wait_for(lambda: client.get("/health").json()["status"] == "degraded")
        refused = client.post("/v1/chat/completions", json={"messages": HELLO})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "starting"
        wait_for(lambda: client.get("/ready").status_code == 200)
        assert client.get("/health").json() == {"status": "ok"} and server.engine_pid() != first
        reply = client.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 2})
        assert reply.status_code == 200, reply.text
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


def check_death(server: ServerProcess, client: httpx2.Client) -> None:
    """The engine is killed: what runs ends with an error, health tells the truth, and so do the log and, some time
    later, the exit code."""
    engine, stream = server.engine_pid(), Streaming(server, LONGEST)
    with ThreadPoolExecutor() as pool:
        plain = pool.submit(client.post, "/v1/chat/completions", json=LONGEST)
        wait_for(lambda: len(stream.lines) > 2)
        os.kill(engine, signal.SIGKILL)
        reply = plain.result(END_S)
    assert reply.status_code == 503 and reply.json()["error"]["code"] == "engine_dead"
    stream.join(END_S)
    assert stream.events[-2]["error"]["code"] == "engine_dead" and stream.events[-1] == "[DONE]"
    for path in ("/health", "/ready"):
        assert client.get(path).status_code == 503
    late = client.post("/v1/chat/completions", json={"messages": HELLO})
    assert late.status_code == 503 and late.headers["retry-after"]
    assert client.get("/metrics").status_code == 200
    assert "its process was ended by SIGKILL" in " ".join(server.text.split())
    assert server.wait() == 1


def test_a_deadline_ends_a_request(server: ServerProcess, http: httpx2.Client) -> None:
    reply = http.post("/v1/chat/completions", json={**LONG, "n": 8, "timeout": 0.05})
    assert reply.status_code == 408 and reply.json()["error"]["code"] == "deadline_exceeded"
    late = http.post("/v1/chat/completions", json={**LONG, "n": 8}, headers={"x-request-timeout": "0.05"})
    assert late.status_code == 408
    for timeout_s in (1.5, 6, 24):  # on a busy machine it may be over before the first token
        stream = Streaming(server, {**LONG, "n": 8, "timeout": timeout_s})
        stream.join(END_S)
        if stream.raw.startswith(b"data:"):
            break
    assert stream.events[-1] == "[DONE]"


def test_what_the_engine_finds_wrong_ends_the_server(checkpoint: Path, tmp_path: Path) -> None:
    with running(checkpoint, tmp_path / "log", engine={"kv_cache_tokens": 64}) as server:
        assert server.popen.wait(START_S) == 2
        assert "lower --max-model-len" in server.text and "Traceback" not in server.text

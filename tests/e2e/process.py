"""A real server process on a free port, and the ways to end it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from tests.child_processes import children, words_of

START_S = 300.0  # on a busy machine
END_S = 180.0
_READY = re.compile(r"ready on (http://\S+)")
_LISTENING = re.compile(r"listening on (http://\S+)")
_PROGRAM = """
import json, sys
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings
from saccade.inputs.media.media_loader import MediaSettings
from saccade.server.front_end import serve
from saccade.server.lifecycle import Launch
from saccade.server.server_settings import ServerSettings
given = json.loads(sys.argv[1])
server = {k: tuple(v) if isinstance(v, list) else v for k, v in given["server"].items()}
engine, limits = EngineSettings(**given["engine"]), SchedulerSettings(**given["limits"])
sys.exit(serve(Launch(given["model"], engine, limits, MediaSettings(**given["media"])), ServerSettings(**server)))
"""
ENGINE = {
    "device": "cpu",
    "block_size": 8,
    "kv_cache_tokens": 4096,
    "encoder_cache_tokens": 512,
    "graphs": "vision=off,prefill=off,decode=off",
}
LIMITS = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "max_model_len": 512,
    "encoder_budget_tokens": 256,
    "max_queued_requests": 64,
}


class ServerProcess:
    def __init__(self, model: Path | str, log: Path, **settings: dict[str, Any]) -> None:
        given = {
            "model": str(model),
            "server": {"port": 0, "served_model_name": ["tiny"], **settings.get("server", {})},
            "engine": {**ENGINE, **settings.get("engine", {})},
            "limits": {**LIMITS, **settings.get("limits", {})},
            "media": settings.get("media", {}),
        }
        self.log = log
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with log.open("w") as file:
            self.popen = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, json.dumps(given)], stderr=file, stdout=file, env=environment
            )

    @property
    def text(self) -> str:
        return self.log.read_text()

    @property
    def url(self) -> str:
        return self._found(_LISTENING)

    def wait_ready(self) -> str:
        return self._found(_READY)

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def wait(self) -> int:
        return self.popen.wait(END_S)

    def engine_pid(self) -> int:
        for _ in range(100):
            if found := children_of(self.popen.pid, "saccade.execution.worker_start"):
                break
            time.sleep(0.02)  # it is left out while another child ends
        [pid] = found
        return pid

    def rank_pids(self) -> list[int]:
        """Of the ranks behind the first, which is the engine's own process."""
        return sorted(children_of(self.engine_pid(), "saccade.execution.rank"))

    def media_pids(self) -> list[int]:
        """Of the processes that decode images and videos."""
        return children_of(self.popen.pid, "saccade.inputs.media.media_process")

    def client(self, **more: Any) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=END_S, trust_env=False, **more)

    def _found(self, pattern: re.Pattern[str]) -> str:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if found := pattern.search(self.text):
                return found.group(1)
            assert self.popen.poll() is None, f"the server ended:\n{self.text}"
            time.sleep(0.02)
        raise AssertionError(f"the server did not start:\n{self.text}")


def children_of(pid: int, module: str) -> list[int]:
    """Processes of a module that it has started."""
    return [child for child in children(pid) if module.encode() in words_of(child)]


@contextmanager
def running(model: Path | str, log: Path, **settings: dict[str, Any]) -> Iterator[ServerProcess]:
    """A server that has ended when the block is left, however it is left."""
    server = ServerProcess(model, log, **settings)
    try:
        yield server
    finally:
        if server.popen.poll() is None:
            server.signal(signal.SIGTERM)
            try:
                server.wait()
            except subprocess.TimeoutExpired:
                server.popen.kill()
                server.wait()

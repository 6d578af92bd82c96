"""A cluster in a separate process, and what tests do to it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import orjson

from tests.child_processes import children

WAIT_S = 300.0  # on a busy machine
ROOT = Path(__file__).parents[2]


class RunningCluster:
    def __init__(self, log: Path) -> None:
        self.log = log
        folders = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": folders}
        with log.open("w") as file:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "tests.ray.driver"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=self._environment,
            )
        self.url, self._headers = "", dict[str, str]()

    def tell(self, name: str, **settings: Any) -> Any:
        assert self.popen.stdin is not None and self.popen.stdout is not None, "they are pipes"
        self.popen.stdin.write(json.dumps([name, settings]) + "\n")
        self.popen.stdin.flush()
        line = self.popen.stdout.readline()
        assert line, f"the cluster's driver ended:\n{self.log.read_text()[-4000:]}"
        said = json.loads(line)
        assert "error" not in said, f"{said['error']}\n{self.log.read_text()[-4000:]}"
        return said["answer"]

    def deploy(self, **settings: Any) -> None:
        self.url = self.tell("deploy", **settings)

    def deploy_by_command(self, config: Path, keys: Sequence[str]) -> None:
        """Runs `saccade deploy` with a settings file."""
        place = self.tell("place")
        words = ("-m", "saccade", "deploy", "--address", place["address"], "--config", str(config))
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=self._environment)
        assert done.returncode == 0 and done.stdout.startswith("ready on"), done.stderr
        self.url, self._headers = place["url"], {"authorization": f"Bearer {keys[0]}"}

    def client(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=WAIT_S, trust_env=False, headers=self._headers)

    def async_client(self) -> httpx2.AsyncClient:
        limits = httpx2.Limits(max_connections=None)
        return httpx2.AsyncClient(
            base_url=self.url, timeout=WAIT_S, trust_env=False, limits=limits, headers=self._headers
        )

    def replica_pids(self) -> list[int]:
        """Process ids of the engine replicas; each has a worker as a child."""
        return [pid for pid in descendants(self.popen.pid) if b"ServeReplica:saccade:engines" in title_of(pid)]

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end, f"{what} did not come:\n{self.log.read_text()[-4000:]}"
            time.sleep(0.2)

    def wait_running(self, count: int) -> None:
        """Waits until this many engines run and report."""

        def is_there() -> bool:
            if self.tell("num_replicas") != {"RUNNING": count}:
                return False
            with self.client() as client:
                return len(engines_of(client.get("/metrics").text)) == count

        self.wait_for(is_there, f"{count} engines")

    def wait_idle(self) -> None:
        def is_idle() -> bool:
            with self.client() as client:
                running = engines_of(client.get("/metrics").text)
                return client.get("/load").json()["server_load"] == 0 and not any(running.values())

        self.wait_for(is_idle, "an idle server")

    def close(self) -> None:
        assert self.popen.stdin is not None, "it is a pipe"
        pids = descendants(self.popen.pid)
        self.popen.stdin.close()
        with self.popen:
            try:
                self.popen.wait(WAIT_S)
            finally:
                self.popen.kill()
                for pid in pids:  # whatever is left
                    if b"ray" in title_of(pid):
                        os.kill(pid, signal.SIGKILL)


@contextmanager
def cluster(log: Path) -> Iterator[RunningCluster]:
    found = RunningCluster(log)
    try:
        yield found
    finally:
        found.close()


def descendants(pid: int) -> list[int]:
    found, new = list[int](), [pid]
    while new:
        new = [child for one in new for child in children(one)]
        found += new
    return found


def title_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def engines_of(text: str) -> dict[str, float]:
    """Running requests by engine, from /metrics."""
    lines = [line for line in text.splitlines() if line.startswith("saccade:num_requests_running{")]
    return {line.split('engine="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}


class Streams:
    """Long streams of text, each with a different prefix, and how each of them ended."""

    def __init__(self, count: int, num_tokens: int) -> None:
        self.count, self.num_tokens = count, num_tokens
        self.begun = set[int]()

    async def run(self, client: httpx2.AsyncClient, when_begun: Callable[[], Any]) -> list[tuple[int, str]]:
        """Calls `when_begun` once all streams have begun; returns the tokens and the end of each."""
        tasks = [asyncio.create_task(self._one(client, number)) for number in range(self.count)]
        while len(self.begun) < self.count:
            assert not any(task.done() for task in tasks), "a stream ended before all had begun"
            await asyncio.sleep(0.01)
        await asyncio.to_thread(when_begun)
        return await asyncio.gather(*tasks)

    async def _one(self, client: httpx2.AsyncClient, number: int) -> tuple[int, str]:
        body = {"prompt": f"{number} {time.time()}: once upon", "max_tokens": self.num_tokens, "stream": True}
        body |= {"ignore_eos": True, "return_token_ids": True}
        num_tokens, end = 0, "cut off"
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            assert reply.status_code == 200, await reply.aread()
            async for event in events(reply):
                if "error" in event:
                    return num_tokens, str(event["error"]["code"])
                for choice in event["choices"]:
                    num_tokens += len(choice.get("token_ids") or ())
                    end = choice["finish_reason"] or end
                self.begun.add(number)
        return num_tokens, end

    def check(self, ends: list[tuple[int, str]]) -> None:
        """Some streams were lost with their engine and reported that; the others are complete and answered once."""
        whole = [end for end in ends if end[1] != "engine_dead"]
        assert 0 < len(whole) < self.count, ends
        assert whole == [(self.num_tokens, "length")] * len(whole), ends


async def events(reply: httpx2.Response) -> AsyncGenerator[Any, None]:
    async for line in reply.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield orjson.loads(line[6:])

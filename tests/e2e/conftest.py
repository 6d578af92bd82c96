"""One checkpoint and one server process for all end-to-end tests that leave it well."""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest

from tests.e2e.checkpoint import make_checkpoint
from tests.e2e.metrics import gauges
from tests.e2e.process import ServerProcess, running

IDLE_S = 180.0


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def shared(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    settings = {
        "admin_api_key": "boss",
        "strict": True,
        "sse_ping_s": 5.0,
        "max_body_bytes": 8 * 2**20,
        "reasoning_parser": "qwen3",
    }
    with running(checkpoint, tmp_path_factory.mktemp("server") / "log", server=settings) as server:
        server.wait_ready()
        yield server


@pytest.fixture
def server(shared: ServerProcess) -> Iterator[ServerProcess]:
    """The shared server, which must be idle and sound when a test has ended."""
    yield shared
    with shared.client() as client:
        assert client.get("/ready").status_code == 200, shared.text
        wait_idle(client)


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx2.Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=IDLE_S) as found:
        yield found


def wait_idle(client: httpx2.Client) -> None:
    """Returns when nothing runs, waits or is held; fails if that does not come."""
    end = time.monotonic() + IDLE_S
    while True:
        found = gauges(client.get("/metrics").text)
        load = client.get("/load").json()["server_load"]
        held = {name: found[name] for name in HELD if found[name]}
        if not held and not load:
            return
        assert time.monotonic() < end, f"still held: {held}, {load} requests inside"
        time.sleep(0.05)


HELD = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "saccade:encoder_cache_usage",
    "saccade:requests_pending",
)

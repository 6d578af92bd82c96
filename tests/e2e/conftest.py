"""One checkpoint, one server process and one browser for all end-to-end tests that leave them well."""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest
from PIL import Image, ImageDraw

from tests.e2e.browser import Browser, find_browser
from tests.e2e.checkpoint import make_checkpoint
from tests.e2e.metrics import gauges
from tests.e2e.page_stub import Stub, running_stub
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


@pytest.fixture(scope="session")
def any_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip("no chromium; Debian's package is called chromium")
    browser = Browser(program, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def browser(any_browser: Browser) -> Browser:
    """On a desktop, in light colors, without motion. The page of an earlier test, which may still ask its server, is
    left."""
    any_browser.open("about:blank")
    any_browser.resize(1280, 800)
    any_browser.prefer(prefers_color_scheme="light", prefers_reduced_motion="reduce")
    any_browser.seen.clear()
    return any_browser


@pytest.fixture
def stub() -> Iterator[Stub]:
    """With a port of its own, so that a browser keeps nothing from test to test."""
    with running_stub() as server:
        yield server


@pytest.fixture(scope="session")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    image = Image.new("RGB", (400, 200), "white")
    ImageDraw.Draw(image).ellipse((30, 20, 90, 80), fill="red")
    path = tmp_path_factory.mktemp("pictures") / "circle.png"
    image.save(path)
    return path


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

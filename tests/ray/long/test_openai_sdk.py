"""The tests of the OpenAI client, which `tests/e2e` has for a server, against replicas on a cluster."""

from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest

from tests.e2e.checkpoint import make_checkpoint
from tests.e2e.process import ENGINE, LIMITS
from tests.e2e.test_openai import *  # noqa: F403
from tests.ray.running import WAIT_S, RunningCluster


@pytest.fixture(scope="module")
def tiny(nodes: RunningCluster, tmp_path_factory: pytest.TempPathFactory) -> RunningCluster:
    folder: Path = make_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    own = {"served_model_name": ["tiny"], "strict": True, "reasoning_parser": "qwen3"}
    nodes.deploy(model=str(folder), replicas=2, **ENGINE, **LIMITS, **own)
    nodes.wait_running(2)
    return nodes


@pytest.fixture
def http(tiny: RunningCluster) -> Iterator[httpx2.Client]:
    with tiny.client() as client:
        yield client
    tiny.wait_idle()


@pytest.fixture
def client(tiny: RunningCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as found:
        yield found

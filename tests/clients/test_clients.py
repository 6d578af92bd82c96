"""Clients that people already use, at pinned versions, against one real server of the bundled model.

They run in separate environments, because several conflict with the openai package of the dev extra. `vllm bench serve`
and `sglang.bench_serving` are left out because they do not fit in a reasonable space (400 MB): vLLM and SGLang pin
torch and torchvision and bring gigabytes of CUDA. tests/e2e/test_benches.py tests what they send.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from saccade import bundled
from tests.clients.environment import CannotInstallError, interpreter_for
from tests.e2e.process import ServerProcess, running

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
TIMEOUT_S = 1200  # on a busy machine
# By environment: clients, and the packages whose versions docs/serve.md lists.
CLIENTS = {
    "applications": {
        "instructor": "instructor",
        "langchain": "langchain-openai",
        "litellm": "litellm",
        "llama_index": "llama-index-llms-openai-like",
        "pydantic_ai": "pydantic-ai-slim",
    },
    "benches": {"aiperf": "aiperf"},
    "guidellm": {"guidellm": "guidellm"},
}
NAMES = [(environment, name) for environment, names in CLIENTS.items() for name in names]
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
LIMITS = {"max_model_len": 1024, "max_num_seqs": 4}
Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    named = {"served_model_name": ["saccade"]}
    with running(bundled.path(), tmp_path_factory.mktemp("clients") / "log", server=named, limits=LIMITS) as found:
        found.wait_ready()
        yield found


@pytest.fixture(scope="module")
def results(server: ServerProcess) -> dict[str, Results]:
    """The results so far, by environment."""
    return {}


def checks_of(environment: str, server: ServerProcess, results: dict[str, Results]) -> Results:
    """Runs all clients of an environment in one process, the first time one of them is needed."""
    if environment not in results:
        try:
            python = interpreter_for(FOLDER / f"{environment}.txt")
        except CannotInstallError as error:
            pytest.skip(str(error))
        command = [str(python), "-m", "tests.clients.run_checks", server.url, *CLIENTS[environment]]
        variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        done = subprocess.run(
            command, cwd=ROOT, env=variables | OFFLINE, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found: Results = {name: [] for name in CLIENTS[environment]}
        for line in done.stdout.splitlines():
            if line.startswith('{"client": '):
                told = json.loads(line)
                found[told["client"]].append(told)
        results[environment] = found
    return results[environment]


@pytest.mark.parametrize(("environment", "name"), NAMES)
def test_a_client_works(environment: str, name: str, server: ServerProcess, results: dict[str, Results]) -> None:
    found = checks_of(environment, server, results)[name]
    written = re.findall(r"^def (check_\w+)", (FOLDER / f"{name}_client.py").read_text(), re.MULTILINE)
    assert [told["check"] for told in found] == written != []
    failed = [f"{told['check']}: {told['error']}" for told in found if told["error"]]
    assert not failed, "\n".join(failed)


def pinned(environment: str) -> dict[str, str]:
    lines = (FOLDER / f"{environment}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


@pytest.mark.parametrize("environment", CLIENTS)
def test_the_docs_name_the_tested_versions(environment: str) -> None:
    text = (ROOT / "docs" / "serve.md").read_text()
    versions = pinned(environment)
    assert not [name for name in versions if name.startswith(("torch", "nvidia-cu", "triton"))]
    assert not [name for name in CLIENTS[environment].values() if f"{name} {versions[name]}" not in text]

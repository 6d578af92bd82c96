"""Commands as people type them, against the bundled model: those of sglang#15320, and of the quick start."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from saccade import bundled
from tests.cli.test_aliases import BENCH, SERVE
from tests.docs import DOCS, ROOT

BOUND_S = 300.0  # on a busy machine
VARIABLES = {
    "SGLANG_MM_FEATURE_CACHE_MB": "4096",
    "SGLANG_USE_CUDA_IPC_TRANSPORT": "1",
    "SGLANG_VLM_CACHE_SIZE_MB": "0",
    "SGLANG_VIT_ENABLE_CUDA_GRAPH": "1",
}
# Graphs of steps of 8192 rows take a CPU half a minute and gigabytes; those of images and outputs are here.
CHEAPER = {"SACCADE_GRAPHS": "prefill=off", "OMP_NUM_THREADS": "1"}
DIRECT = {**os.environ, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
READY = re.compile(r"ready on http://127\.0\.0\.1:(\d+)")


def saccade(*words: str) -> list[str]:
    return [sys.executable, "-m", "saccade", *words]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The port of the server, and its log."""
    log = tmp_path_factory.mktemp("commands") / "log"
    flags = SERVE.format(tp="").replace("--port 30000", "--port 0").replace("FOLDER", shlex.quote(str(bundled.path())))
    with log.open("w") as file:
        how = {"stdout": file, "stderr": file, "env": {**os.environ, **VARIABLES, **CHEAPER}}
        server = subprocess.Popen(saccade("serve", *shlex.split(flags)), **how)  # type: ignore[call-overload]
    try:
        end = time.monotonic() + BOUND_S
        while (found := READY.search(log.read_text())) is None:
            assert server.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        yield found.group(1), log
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(BOUND_S)
        finally:
            server.kill()


def test_the_server_says_what_of_its_command_changes_nothing(started: tuple[str, Path]) -> None:
    lines = started[1].read_text().splitlines()
    for name in ("--attention-backend", "--enable-multimodal", "--enable-torch-symm-mem", *VARIABLES):
        assert sum(line.startswith(f"warning: {name} changes nothing: ") for line in lines) == 1


def test_the_benchmark_runs_and_prints_what_sglangs_prints(started: tuple[str, Path]) -> None:
    flags = BENCH.replace("--port 30000", f"--port {started[0]}").replace("--num-prompts 256", "--num-prompts 6")
    run = subprocess.run(
        saccade("bench", "serve", *shlex.split(flags)), capture_output=True, text=True, timeout=BOUND_S
    )
    assert run.returncode == 0, run.stdout + run.stderr
    found = dict(line.split(":", 1) for line in run.stdout.splitlines() if ":  " in line)
    assert (found["Successful requests"].strip(), found["Failed requests"].strip()) == ("6", "0")
    assert int(found["Total input vision tokens"]) > 0 and int(found["Total generated tokens"]) == 6
    assert int(found["Total generated tokens (retokenized)"]) >= 0 and "P95 ITL (ms)" in found
    assert run.stderr.startswith("warning: --apply-chat-template changes nothing: ")
    with httpx2.Client(base_url=f"http://127.0.0.1:{started[0]}", trust_env=False) as client:
        phases = {phase["phase"]: phase for phase in client.get("/graphs").json()["phases"]}
    assert sum(phases["vision"]["replays"].values()) > 0


def test_the_clients_of_the_quick_start_are_answered(started: tuple[str, Path]) -> None:
    """OpenAI's client and curl, with the port and the model of this server."""
    page = (DOCS / "quickstart.md").read_text()
    [script] = re.findall(r"```python\n(.*?)```", page, re.S)
    [shell] = [text for text in re.findall(r"```bash\n(.*?)```", page, re.S) if text.startswith("curl")]
    assert script in (ROOT / "README.md").read_text()

    def said(*command: str) -> str:
        local = [word.replace(":8000", f":{started[0]}") for word in command]
        run = subprocess.run(local, cwd=ROOT, capture_output=True, text=True, timeout=BOUND_S, env=DIRECT)
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout

    assert said(sys.executable, "-c", script.replace('model="saccade"', 'model="auto"')).strip() == "purple"
    if shutil.which("curl"):
        assert json.loads(said("bash", "-c", shell))["choices"][0]["message"]["content"] == "HELLO"


def test_the_server_with_ranks_says_what_cannot_be_divided() -> None:
    """The command of sglang#15320 as it is, with four ranks: the bundled model has six heads."""
    flags = SERVE.format(tp="--tp-size 4 ").replace("--port 30000", "--port 0")
    flags = flags.replace("FOLDER", shlex.quote(str(bundled.path())))
    run = subprocess.run(
        saccade("serve", *shlex.split(flags), "--device", "cpu"), capture_output=True, text=True, timeout=BOUND_S
    )
    assert run.returncode == 2
    last = run.stderr.splitlines()[-1]
    assert last.startswith("saccade: num_heads = 6 cannot be split evenly over 4 ranks; choose")

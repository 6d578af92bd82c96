"""Every Triton kernel matches its oracle on the CPU, through Triton's interpreter in a separate process."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

FOLDER = Path(__file__).parent / "interpreted"
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """By file, the failure of each test or "". One process runs them all, because starting it takes seconds."""
    report = tmp_path_factory.mktemp("interpreted") / "report.xml"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", str(FOLDER)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment = {k: v for k, v in environment.items() if not k.startswith("PYTEST_")}
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=3600)
    assert run.returncode in (0, 1), run.stdout[-8000:] + run.stderr[-2000:]
    found: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        wrong = [f"{case.get('name')}: {part.text or ''}" for part in case if part.tag in ("failure", "error")]
        found.setdefault(case.get("classname", "").rpartition(".")[2], []).append("\n".join(wrong))
    return found


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("test_*.py")))
def test_triton_kernels_match_their_oracles(outcomes: dict[str, list[str]], name: str) -> None:
    assert outcomes[name], "no test was run"
    assert not any(outcomes[name]), "\n".join(outcomes[name])[-8000:]

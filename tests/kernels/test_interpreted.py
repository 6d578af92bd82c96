"""Every Triton kernel equals its oracle, shown on the CPU through Triton's interpreter in a process of its own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_triton_kernels_equal_their_oracles(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", str(FOLDER / name)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment = {k: v for k, v in environment.items() if not k.startswith("PYTEST_")}
    root = Path(__file__).parents[2]
    run = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=1800)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert " passed" in run.stdout, run.stdout

"""The front end touches no tensor, so it imports nothing that computes with them: that takes seconds and 180 MB."""

import subprocess
import sys

_PROGRAM = """
import sys
import saccade.server.run
sys.exit(" ".join({"torch", "triton"} & set(sys.modules)) or 0)
"""


def test_the_front_end_imports_neither_torch_nor_triton() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"imported: {done.stderr}"

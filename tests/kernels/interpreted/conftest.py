"""These tests run Triton kernels on the CPU, in a process of their own (see tests/kernels/test_interpreted.py).

Triton decides at import whether it interprets, so the choice belongs to a process: a CUDA test in this one would be
interpreted too. By hand: TRITON_INTERPRET=1 pytest tests/kernels/interpreted
"""

import os
from collections.abc import Iterator

import numpy as np
import pytest

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True)
def quiet_arithmetic() -> Iterator[None]:
    """The interpreter computes with NumPy, which warns where a GPU silently gives infinity or NaN."""
    with np.errstate(all="ignore"):
        yield

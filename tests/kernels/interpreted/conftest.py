"""These tests run Triton kernels on the CPU, in a separate process (see tests/kernels/test_interpreted.py).

Triton decides at import whether to interpret, so a CUDA test in the same process would be interpreted too. To run them
by hand: TRITON_INTERPRET=1 pytest tests/kernels/interpreted
"""

import os
from collections.abc import Iterator

import numpy as np
import pytest

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True)
def quiet_arithmetic() -> Iterator[None]:
    """The interpreter computes with NumPy, which warns where a GPU silently returns infinity or NaN."""
    with np.errstate(all="ignore"):
        yield

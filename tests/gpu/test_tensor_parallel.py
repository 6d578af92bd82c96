"""Tensor parallelism with two rank processes on one GPU. They take turns, so nothing is timed. The cases are in
`rank_cases`."""

from functools import cache

import pytest

from saccade.config import SHARED_GPU
from tests.gpu import rank_cases
from tests.ranks import run_cases

pytestmark = pytest.mark.cuda


@cache
def found() -> dict[str, str]:
    return run_cases(2, rank_cases.__name__, device="cuda:0", stall_s=150, variables={SHARED_GPU: "1"})


@pytest.mark.parametrize("case", rank_cases.CASES)
def test_two_ranks_on_one_gpu(case: str) -> None:
    """Sums agree with float32; hidden states of two ranks with those of one, within bfloat16's error; graphs with eager
    runs, bit for bit; and all ranks have the same bits."""
    assert not found()[case], found()[case]

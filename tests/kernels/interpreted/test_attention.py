"""Triton attention against its oracle: boundaries as data, poison outside them, grouped heads, windows, limits."""

import pytest
import torch

from saccade.kernels import reference
from saccade.kernels.backends import AttentionDispatch
from saccade.kernels.fused_attention import TritonAttention, choose_splits
from tests.kernels.cases import POISON, Paged, boundaries, paged_case, qkv_slices, span_limits

DTYPES = [torch.float32, torch.float16]
TRITON = AttentionDispatch(TritonAttention())

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # NumPy's, from poisoned rows


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-5 if actual.dtype == torch.float32 else 4e-3
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("heads", "groups", "width", "lengths"),
    [
        (2, 2, 72, [5, 0, 17, 1, 0, 9]),
        (2, 1, 80, [64, 3, 33]),
        (1, 1, 64, [1]),
        (2, 2, 128, [0, 20]),
    ],
)
@pytest.mark.parametrize(("causal", "dtype"), [(False, torch.float16), (True, torch.float32)])
def test_varlen(heads: int, groups: int, width: int, lengths: list[int], causal: bool, dtype: torch.dtype) -> None:
    q, k, v = qkv_slices(sum(lengths), heads, groups, width, seed=1, dtype=dtype)
    starts = boundaries(lengths)
    ours = TRITON.varlen_attention(q, k, v, starts, max(lengths), scale=0.11, causal=causal)
    close(ours, reference.varlen_attention(q, k, v, starts, max(lengths), scale=0.11, causal=causal))


def test_varlen_loops_over_segments_longer_than_a_tile() -> None:
    q, k, v = qkv_slices(150, 1, 1, 72, seed=2)
    starts = boundaries([130, 20])
    for causal in (False, True):
        ours = TRITON.varlen_attention(q, k, v, starts, 130, scale=0.1, causal=causal)
        close(ours, reference.varlen_attention(q, k, v, starts, 130, scale=0.1, causal=causal))


def test_varlen_poisoned_padding_stays_in_its_segment() -> None:
    q, k, v = qkv_slices(40, 2, 2, 72, seed=3)
    starts = boundaries([7, 9, 0, 24])
    clean = TRITON.varlen_attention(q, k, v, starts, 24, scale=0.1)
    for x in (q, k, v):
        x[16:] = POISON
    ours = TRITON.varlen_attention(q, k, v, starts, 24, scale=0.1)
    assert torch.equal(ours[:16], clean[:16])


def run_both(case: Paged, **options: object) -> None:
    arguments = {"max_query": max(case.num_queries), "max_keys": max(case.num_keys), "scale": 0.13} | options
    ours = TRITON.paged_attention(*case.inputs, **arguments)  # type: ignore[arg-type]
    theirs = reference.paged_attention(*case.inputs, **arguments)  # type: ignore[arg-type]
    assert torch.isfinite(theirs).all()
    close(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [1, 2, 4, 7])
def test_paged_prefill_with_grouped_heads(share: int, dtype: torch.dtype) -> None:
    """A fresh prompt, a chunk after cached keys, a decode row, an empty request, and dummy rows full of NaN."""
    case = paged_case(
        [9, 5, 1, 0, 4], [9, 21, 30, 11, 0], num_heads=2 * share, num_groups=2, head_width=72, dtype=dtype
    )
    run_both(case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{"window": 6}, {"window": 40}])
def test_paged_window(options: dict[str, int], dtype: torch.dtype) -> None:
    case = paged_case([37, 1, 3], [70, 66, 0], num_heads=2, num_groups=1, head_width=64, seed=5, dtype=dtype)
    run_both(case, **options)


@pytest.mark.parametrize("window", [None, 5, 50])
def test_paged_limits_let_image_rows_see_the_whole_image(window: int | None) -> None:
    case = paged_case([30, 12, 2], [30, 40, 0], num_heads=4, num_groups=2, head_width=32, seed=6)
    limits = span_limits(case, {0: [(3, 11), (15, 28)], 1: [(30, 39)]})
    limits[-2:] = 2**30
    assert limits.max() > 0
    run_both(case, limits_T=limits, window=window)


@pytest.mark.parametrize("dtype", DTYPES)
def test_paged_decode_split_along_the_keys(dtype: torch.dtype) -> None:
    """max_keys is large enough to split. One request is so short that most of its splits have no keys."""
    assert choose_splits(4, 1100) == 4
    case = paged_case(
        [1, 1, 1, 1], [300, 7, 129, 0], num_heads=4, num_groups=1, head_width=80, seed=7, dtype=dtype, block_size=64
    )
    run_both(case, max_keys=1100)
    run_both(case, max_keys=1100, window=100)


def test_paged_wide_heads_and_strided_queries() -> None:
    case = paged_case([20, 3], [25, 64], num_heads=2, num_groups=1, head_width=256, seed=8, block_size=32)
    wide = torch.full((23, 4, 256), POISON)
    wide[:, 1:3] = case.q
    q = wide[:, 1:3]
    ours = TRITON.paged_attention(q, *case.inputs[1:], max_query=20, max_keys=64, scale=0.06)
    close(ours, reference.paged_attention(*case.inputs, max_query=20, max_keys=64, scale=0.06))


def test_paged_capacities_larger_than_the_batch_change_nothing() -> None:
    case = paged_case([4, 0, 2], [4, 0, 18], num_heads=2, num_groups=2, head_width=64, seed=9)
    exact = TRITON.paged_attention(*case.inputs, max_query=4, max_keys=18, scale=0.1)
    roomy = TRITON.paged_attention(*case.inputs, max_query=64, max_keys=32, scale=0.1)
    close(roomy, exact)


def test_splits_fill_the_gpu_only_with_real_work() -> None:
    assert choose_splits(8, 8192) == 32
    assert choose_splits(8, 300) == 1
    assert choose_splits(256, 100_000) == 1
    assert choose_splits(64, 100_000) == 4

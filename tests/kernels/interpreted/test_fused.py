"""Fused elementwise kernels against their oracles: odd widths, strided rows, partial rotary, cache writes."""

import pytest
import torch
from torch import Tensor

from saccade.errors import ConfigError
from saccade.kernels import fused, reference
from saccade.kernels.reference_vision import ACTIVATIONS
from tests.kernels.cases import qkv_slices, randn, rotary_tables, turned

DTYPES = [torch.float32, torch.float16]


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    tolerance = 1e-5 if actual.dtype == torch.float32 else 2e-3
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 1152), (1, 72), (2, 5, 80), (4, 1), (2, 4304)])
def test_norms(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    width = shape[-1]
    x, residual = (randn(*shape, seed=s, dtype=dtype) + 0.5 for s in (1, 2))
    weight, bias = (randn(width, seed=s, dtype=dtype) for s in (3, 4))
    assert_same(fused.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    assert_same(fused.rms_norm(x, weight, 1e-6, offset=1.0), reference.rms_norm(x, weight, 1e-6, offset=1.0))
    assert_same(fused.layer_norm(x, weight, bias, 1e-5), reference.layer_norm(x, weight, bias, 1e-5))
    assert_same(fused.layer_norm(x, weight, None, 1e-5), reference.layer_norm(x, weight, None, 1e-5))
    for ours, theirs in zip(
        fused.add_rms_norm(x, residual, weight, 1e-6, offset=1.0)
        + fused.add_layer_norm(x, residual, weight, bias, 1e-5),
        reference.add_rms_norm(x, residual, weight, 1e-6, offset=1.0)
        + reference.add_layer_norm(x, residual, weight, bias, 1e-5),
        strict=True,
    ):
        assert_same(ours, theirs)


def test_norms_read_strided_rows_and_keep_rows_apart() -> None:
    wide = randn(6, 3 * 80, seed=5)
    wide[4] = float("nan")
    x = wide[:, 80:160]
    weight = randn(80, seed=6)
    y = fused.rms_norm(x, weight, 1e-6)
    assert torch.isnan(y[4]).all()
    keep = [0, 1, 2, 3, 5]
    assert_same(y[keep], reference.rms_norm(x[keep], weight, 1e-6))


def test_norms_of_no_rows() -> None:
    x, weight = randn(0, 64, seed=1), randn(64, seed=2)
    assert fused.rms_norm(x, weight, 1e-6).shape == (0, 64)
    assert fused.gated_activation(x, "silu").shape == (0, 32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gated_activation(kind: str, dtype: torch.dtype) -> None:
    wide = randn(3, 2 * 1100 + 8, seed=7, dtype=dtype) * 4
    for x in (wide[:, :2200], wide[:1, :2].contiguous(), randn(2, 2, 72, seed=8, dtype=dtype)):
        assert_same(fused.gated_activation(x, kind), reference.gated_activation(x, kind))


def test_an_unknown_activation_is_refused() -> None:
    for module in (fused, reference):
        with pytest.raises(ConfigError, match="allowed: silu"):
            module.gated_activation(randn(1, 4, seed=1), "relu")


@pytest.mark.parametrize(
    ("heads", "groups", "width", "columns", "dtype"),
    [
        (6, 6, 72, 72, torch.float16),
        (7, 1, 64, 64, torch.float32),
        (5, 5, 80, 80, torch.float32),
        (4, 2, 128, 128, torch.float16),
        (3, 3, 64, 32, torch.float32),
        (6, 2, 80, 16, torch.float16),
    ],
)
def test_rotary_with_and_without_norm(heads: int, groups: int, width: int, columns: int, dtype: torch.dtype) -> None:
    q, k, _ = qkv_slices(3, heads, groups, width, seed=9, dtype=dtype)
    cos, sin = rotary_tables(3, columns, seed=10)
    a, b = randn(width, seed=11, dtype=dtype), randn(width, seed=12, dtype=dtype)
    for weights, offset in (((None, None), 0.0), ((a, b), 0.0), ((None, b), 1.0), ((a, None), 1.0)):
        ours = turned(fused, q, k, cos, sin, weights, offset)
        for mine, theirs in zip(ours, turned(reference, q, k, cos, sin, weights, offset), strict=True):
            assert_same(mine, theirs)


@pytest.mark.parametrize(("groups", "dtype"), [(2, torch.float32), (9, torch.float16)])
def test_store_writes_the_named_slots_and_nothing_else(groups: int, dtype: torch.dtype) -> None:
    q, k, v = qkv_slices(6, 2 * groups, groups, 72, seed=13, dtype=dtype)
    cos, sin = rotary_tables(6, 72, seed=14)
    weight = randn(72, seed=15, dtype=dtype)
    slots = torch.tensor([17, 5 * 16, 3 * 16 + 15, 0, 1, 2 * 16], dtype=torch.int32)
    before = [randn(7, 16, groups, 72, seed=s, dtype=dtype) for s in (16, 17)]
    expected, ours = ([x.clone() for x in before] for _ in range(2))
    q_expected = reference.qk_norm_rotary_store(q, k, v, weight, weight, 1e-6, cos, sin, slots, *expected)
    q_ours = fused.qk_norm_rotary_store(q, k, v, weight, weight, 1e-6, cos, sin, slots, *ours)
    assert_same(q_ours, q_expected)
    untouched = torch.ones(7 * 16, dtype=torch.bool)
    untouched[slots.long()] = False
    for i in range(2):
        assert_same(ours[i], expected[i])
        assert torch.equal(ours[i].view(112, groups, 72)[untouched], before[i].view(112, -1, 72)[untouched])


@pytest.mark.parametrize("num_rows", [0, 1, 1025])
def test_newest_tokens(num_rows: int) -> None:
    rng = torch.Generator().manual_seed(num_rows)
    ids, pending = (torch.randint(low, 9, (num_rows,), generator=rng, dtype=torch.int32) for low in (0, -4))
    newest = torch.arange(2**40, 2**40 + 9)
    found = fused.newest_tokens(ids, pending, newest)
    assert found.dtype == torch.int64 and torch.equal(found, reference.newest_tokens(ids, pending, newest))


@pytest.mark.parametrize(("num_rows", "num_frequencies"), [(0, 64), (1, 64), (37, 36), (5, 1), (9, 80)])
def test_tables_of_positions(num_rows: int, num_frequencies: int) -> None:
    """Positions are rows of a wider buffer, or columns of a patch grid."""
    rng = torch.Generator().manual_seed(3)
    axes = torch.randint(0, 3, (num_frequencies,), generator=rng)
    frequencies = 1e6 ** (-torch.arange(num_frequencies) / num_frequencies)
    wide = torch.randint(0, 300_000, (3, num_rows + 5), generator=rng, dtype=torch.int32)
    grid = torch.randint(0, 300, (num_rows, 3), generator=rng)
    for positions in (wide[:, :num_rows], grid.T):
        found = fused.rotary_tables(positions, axes, frequencies)
        for ours, theirs in zip(found, reference.rotary_tables(positions, axes, frequencies), strict=True):
            assert_same(ours, theirs)


def test_store_into_a_strided_cache() -> None:
    """Keys and values may be interleaved in one allocation."""
    k, v = randn(3, 2, 64, seed=18), randn(3, 2, 64, seed=19)
    v[1, 1, 5], v[2, 0, 7] = float("nan"), float("inf")
    cos, sin = rotary_tables(3, 64, seed=20)
    slots = torch.tensor([9, 4, 11], dtype=torch.int64)
    ours, theirs = (torch.zeros(4, 2, 4, 2, 64) for _ in range(2))
    for module, cache in ((fused, ours), (reference, theirs)):
        module.qk_norm_rotary_store(k, k, v, None, None, 0.0, cos, sin, slots, cache[:, 0], cache[:, 1])
    assert_same(ours, theirs)
    assert torch.equal(ours[2, 1, 1], v[0])
    assert ours[1, 1, 0, 1, 5] == ours[2, 1, 3, 0, 7] == 0, "values that are not finite are stored as 0"


@pytest.mark.parametrize(("width", "inner"), [(5, 72), (10, 4096), (9, 6144), (2, 8)])
def test_products_with_one_row(width: int, inner: int) -> None:
    x, bias = randn(1, inner, seed=1, dtype=torch.float16), randn(width, seed=2, dtype=torch.float16)
    weight = (randn(2 * width, inner, seed=3) * inner**-0.5).half()
    half = weight[:width]
    out = torch.full((1, width), float("nan"), dtype=torch.float16)
    assert_same(fused.linear(x, half), reference.linear(x.float(), half.float()).half())
    assert fused.linear(x, half, bias, out) is out
    assert_same(out, reference.linear(x.float(), half.float(), bias.float()).half())
    assert_same(fused.gated_linear(x, weight, "silu"), reference.gated_linear(x, weight, "silu"))


def test_a_row_of_a_wider_tensor_is_a_row() -> None:
    wide, weight = randn(3, 400, seed=4, dtype=torch.float16), randn(9, 72, seed=5, dtype=torch.float16)
    x = wide[1:2, 100:172]
    assert_same(fused.linear(x, weight), reference.linear(x.float(), weight.float()).half())

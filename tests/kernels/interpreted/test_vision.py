"""Vision-tower kernels against their oracles."""

import pytest
import torch

from saccade.kernels import fused_vision, reference
from saccade.kernels.reference_vision import ACTIVATIONS
from tests.kernels.cases import POISON, randn, rotary_tables, turned

DTYPES = [torch.float32, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "width"), [(16, 72), (3, 80), (2, 64), (1, 8)])
def test_rotary_in_place(heads: int, width: int, dtype: torch.dtype) -> None:
    wide = randn(5, 3 * heads * width + 8, seed=1, dtype=dtype)
    packed = wide[:, : 3 * heads * width]
    half_cos, half_sin = rotary_tables(5, width // 2, seed=2)
    cos, sin = torch.cat([half_cos] * 2, dim=1), torch.cat([half_sin] * 2, dim=1)
    given = packed.clone()
    q, k, _ = given.view(5, 3, heads, width).unbind(1)
    expected = reference.rotate_packed(given.clone(), heads, cos, sin)
    for mine, other in zip(expected[:2], turned(reference, q, k, cos, sin), strict=True):
        assert torch.equal(mine, other)
    rest = wide[:, 3 * heads * width :].clone()
    contiguous = packed.contiguous()
    for ours, theirs in zip(fused_vision.rotate_packed(contiguous, heads, cos, sin), expected, strict=True):
        tolerance = 1e-6 if dtype == torch.float32 else 2e-3
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert torch.equal(wide[:, 3 * heads * width :], rest)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1152, 40])
def test_positions(width: int, dtype: torch.dtype) -> None:
    x, table = randn(7, width, seed=1, dtype=dtype), randn(9, width, seed=2, dtype=dtype)
    indices = torch.randint(0, 9, (4, 7), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    weights = randn(4, 7, seed=4)
    ours = fused_vision.add_positions(x, table, indices, weights)
    theirs = reference.add_positions(x, table, indices, weights)
    tolerance = 1e-6 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_rows_are_scattered_in_every_level_and_nowhere_else() -> None:
    rows, targets = randn(3, 5, 2100, seed=1), torch.tensor([4, 9, 1, 0, 0])
    ours, theirs = (torch.full((3, 12, 2100), POISON) for _ in range(2))
    fused_vision.scatter_rows(rows, targets, ours)
    reference.scatter_rows(rows, targets, theirs)
    kept = [i for i in range(12) if i != 0]  # the row of padding is undefined
    torch.testing.assert_close(ours[:, kept], theirs[:, kept], equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activated_linear(kind: str) -> None:
    x, weight, bias = randn(4, 24, seed=1), randn(40, 24, seed=2), randn(40, seed=3)
    for b in (bias, None):
        ours = fused_vision.activated_linear(x, weight, b, kind)
        torch.testing.assert_close(ours, reference.activated_linear(x, weight, b, kind))


@pytest.mark.parametrize("levels", [1, 4])
@pytest.mark.parametrize("width", [40, 2560])
def test_rows_of_images_among_tokens(width: int, levels: int) -> None:
    embeds, rows = randn(6, width, seed=1), randn(levels, 9, width, seed=2)
    rows[:, 0] = POISON  # no token's source, so nothing may read it
    sources = torch.tensor([-1, 3, 8, -1, 3, -1], dtype=torch.int32)
    expected = reference.place_rows(embeds.clone(), rows, sources)
    placed, others = fused_vision.place_rows(embeds.clone(), rows, sources)
    assert torch.equal(placed, expected[0]) and torch.equal(others, expected[1])
    assert torch.equal(placed[[0, 3, 5]], embeds[[0, 3, 5]]) and torch.equal(placed[1], rows[0, 3])
    assert others.shape == (levels - 1, 6, width) and not others[:, [0, 3, 5]].any()


def test_rows_of_images_in_a_cache_of_more_than_two_billion_values() -> None:
    """The memory is reserved but hardly touched: only a few pages are read or written."""
    tokens, width = 200_000, 4096
    room = torch.empty(4 * tokens * width + 2**31, dtype=torch.float16)  # a 32-bit index would wrap to here
    rows = room[2**31 :].view(4, tokens, width)
    rows[:, 5] = torch.arange(1, 5, dtype=torch.float16)[:, None]
    embeds = torch.zeros(1, width, dtype=torch.float16)
    placed, others = fused_vision.place_rows(embeds, rows, torch.tensor([5], dtype=torch.int32))
    assert placed[0, 0] == 1 and others[:, 0, 0].tolist() == [2, 3, 4]

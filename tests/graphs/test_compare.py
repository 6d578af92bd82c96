"""Comparisons of bits where shapes agree, and within an estimated error where they do not."""

import pytest
import torch
from torch import Tensor

from saccade.graphs.compare import bit_differences, error_differences, noisy_runs


def test_equal_bits_are_equal_even_in_nan_and_infinity() -> None:
    odd = torch.tensor([[1.0, -torch.inf], [torch.nan, 0.0]])
    assert bit_differences({"y": odd.clone()}, {"y": odd}) == []
    assert bit_differences({"y": -odd}, {"y": odd})[0].num_wrong >= 3, "a zero has a sign"


def test_a_difference_names_output_count_and_row() -> None:
    right = torch.randn(4, 6)
    wrong = right.clone()
    wrong[2, 1:3] *= 2
    (found,) = bit_differences({"y": wrong, "ids": torch.arange(4)}, {"y": right, "ids": torch.arange(4)})
    assert str(found) == "2 of 24 values of 'y' differ, the first in row 2"
    assert found.size == pytest.approx(1.0)
    for wrong, size in ((right / 2, 0.5), (right * torch.nan, torch.inf)):
        assert bit_differences({"y": wrong}, {"y": right})[0].size == pytest.approx(size)


def test_a_different_shape_or_dtype_is_a_difference() -> None:
    right = torch.zeros(4)
    for wrong in (torch.zeros(3), torch.zeros(4, dtype=torch.float64)):
        assert bit_differences({"y": wrong}, {"y": right})[0].size == torch.inf
        assert error_differences({"y": wrong}, {"y": right}, [{"y": right}])[0].size == torch.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_in_another_order_are_within_the_estimated_error(dtype: torch.dtype) -> None:
    """Sums in pieces, as in products of other shapes, on random numbers of many scales."""
    for seed in range(5):
        rng = torch.Generator().manual_seed(seed)
        x = torch.randn(16, 256, generator=rng) * torch.logspace(-2, 2, 16)[:, None]
        w = torch.randn(256, 24, generator=rng) * torch.logspace(-1, 1, 24)
        x, w = x.to(dtype), w.to(dtype)

        def finish(total: Tensor) -> dict[str, Tensor]:
            return {"y": total.tanh() * 3 + total}

        def plain_run(x: Tensor = x, w: Tensor = w) -> dict[str, Tensor]:
            return finish(x @ w)

        parts = [a.float() @ b.float() for a, b in zip(x.chunk(8, 1), w.chunk(8, 0), strict=True)]
        plain, noisy = plain_run(), noisy_runs(plain_run)
        assert any(bit_differences(run, plain) for run in noisy)
        assert error_differences(finish(torch.stack(parts).sum(0).to(dtype)), plain, noisy) == []
        wrong = {"y": plain["y"].clone()}
        wrong["y"][3, 5] += wrong["y"][3].float().square().mean().sqrt().to(dtype)
        (found,) = error_differences(wrong, plain, noisy)
        assert (found.num_wrong, found.row) == (1, 3) and 1 < found.size < torch.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_units_in_the_last_place_are_never_an_error(dtype: torch.dtype) -> None:
    """Even in a single row, where an element that no noisy run moved has no neighbours to estimate its error from."""
    x = (1 + torch.rand(1, 4096)).to(dtype)  # no zero, which has no last place

    def body() -> dict[str, Tensor]:
        return {"y": x * 3}

    plain, noisy = body(), noisy_runs(body)
    assert any(all(run["y"][0, i] == plain["y"][0, i] for run in noisy) for i in range(4096))
    assert error_differences({"y": plain["y"] * (1 + 2 * torch.finfo(dtype).eps)}, plain, noisy) == []
    assert error_differences({"y": plain["y"] * (1 + 40 * torch.finfo(dtype).eps)}, plain, noisy)[0].num_wrong == 4096


def test_one_large_channel_excuses_nothing_in_the_others() -> None:
    x = torch.randn(32, 8).to(torch.bfloat16)
    loud = torch.zeros(8, dtype=torch.bfloat16)
    loud[0] = 1000

    def body() -> dict[str, Tensor]:
        return {"y": x.tanh() + loud}

    plain, noisy = body(), noisy_runs(body)
    wrong = {"y": plain["y"].clone()}
    wrong["y"][7, 4] += 0.75
    assert [found.row for found in error_differences(wrong, plain, noisy)] == [7]


def test_integers_must_agree_where_rounding_does_not_decide() -> None:
    scores = torch.tensor([[0.0, 1.0, 2.0], [1.0, 1.0 + 1e-7, 0.0]])

    def body() -> dict[str, Tensor]:
        return {"ids": (scores * 1.0).argmax(-1)}

    plain = body()
    noisy = [{"ids": torch.tensor([2, 0])}, {"ids": torch.tensor([2, 1])}]
    assert error_differences({"ids": torch.tensor([2, 0])}, plain, noisy) == []
    assert error_differences({"ids": torch.tensor([1, 1])}, plain, noisy)[0].row == 0


def test_non_finite_values_must_agree_unless_rounding_decides() -> None:
    right = torch.tensor([[torch.nan, torch.inf, 1.0]])
    settled, open_ = [{"y": right}] * 2, [{"y": right}, {"y": torch.tensor([[1.0, 2.0, 1.0]])}]
    assert error_differences({"y": right.clone()}, {"y": right}, settled) == []
    for column, value in enumerate((1.0, -torch.inf, torch.nan)):
        wrong = right.clone()
        wrong[0, column] = value
        (found,) = error_differences({"y": wrong}, {"y": right}, settled)
        assert (found.num_wrong, found.size) == (1, torch.inf)
        assert (error_differences({"y": wrong}, {"y": right}, open_) == []) == (column < 2)


def test_a_single_value_is_compared_and_an_empty_output_never_differs() -> None:
    one = {"y": torch.ones(1)}
    assert error_differences({"y": torch.full((1,), 2.0)}, one, [one])[0].num_wrong == 1
    for shape in ((0, 4), (4, 0)):
        none = {"y": torch.ones(shape)}
        assert error_differences(none, none, [none]) == []


def test_an_element_that_may_overflow_excuses_nothing_beside_it() -> None:
    for right, noisy in ((torch.inf, 5.0), (5.0, torch.inf)):
        plain = {"y": torch.tensor([[right, 1.0]])}
        runs = [{"y": torch.tensor([[noisy, 1.0]])}] * 2
        assert error_differences(plain, plain, runs) == []
        (found,) = error_differences({"y": torch.tensor([[right, 2.0]])}, plain, runs)
        assert found.num_wrong == 1


def test_an_error_is_estimated_from_an_elements_own_row_and_channel() -> None:
    """The row's noise allows it only where the channel's does too, and a silent row allows nothing."""

    def is_allowed(moves: Tensor, row: int, column: int) -> bool:
        plain = {"y": torch.zeros_like(moves)}
        wrong = {"y": torch.zeros_like(moves)}
        wrong["y"][row, column] = 1
        return error_differences(wrong, plain, [{"y": moves}]) == []

    assert is_allowed(torch.tensor([[0.0, 1.0], [1.0, 1.0]]), 0, 0)
    assert not is_allowed(torch.tensor([[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]), 0, 0)
    assert not is_allowed(torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]), 0, 0)


def test_noise_changes_nothing_that_outlives_the_run() -> None:
    cache = torch.randn(8, 4)
    before = cache.clone()

    def body() -> dict[str, Tensor]:
        cache[3].copy_(before[3])
        cache.add_(0)
        return {"y": cache * 2, "squares": cache.t() @ cache}

    runs = noisy_runs(body)
    assert torch.equal(cache, before)
    assert not any(bit_differences(*pair) for pair in zip(runs, noisy_runs(body), strict=True)), "noise is seeded"
    assert any(bit_differences(run, {"y": before * 2}) for run in runs)

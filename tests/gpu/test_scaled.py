"""e4m3 weights on the GPU: every kernel against its oracle, on random rows, also next to non-finite rows."""

import pytest
import torch
from torch import Tensor

from saccade.kernels import reference_scaled
from saccade.kernels.dispatch import Kernels, kernels_for
from saccade.kernels.reference_vision import ACTIVATIONS
from saccade.kernels.weight import Layout, Pending, Scaled, Weight, matrix_of, new_weight, scale_inputs, unscaled

CUDA = torch.device("cuda")
LAYOUTS = ["rows", "blocks", "given"]
SHAPES = [(4096, 6144), (12288, 4096), (1152, 3456), (4352, 1152)]


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return kernels_for(CUDA, torch.bfloat16)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device=CUDA).to(dtype)


def random_weight(layout: str, *shape: int, seed: int) -> Weight:
    kind = Layout.ROWS if layout == "given" else Layout(layout)
    made = new_weight(*shape, layout=kind, dtype=torch.bfloat16, device=CUDA, has_input_scale=layout == "given")
    for i, part in enumerate(made.experts() if len(shape) == 3 else [made]):
        spread = randn(shape[-2], 1, seed=seed + i).exp()  # rows of very different sizes
        part.fill(randn(*shape[-2:], seed=seed + 100 + i) * spread * shape[-1] ** -0.5)
    if made.input_scale is not None:
        made.input_scale.fill_(0.011)
    return made


def error_of(found: Tensor, right: Tensor) -> float:
    return float((found.float() - right.float()).norm() / right.float().norm())


def agree(found: Scaled, right: Scaled) -> None:
    """Almost all numbers agree to the bit; a quotient halfway between two may round either way."""
    torch.testing.assert_close(found.scales, right.scales, rtol=1e-5, atol=0.0)
    differ = found.data.view(torch.uint8) != right.data.view(torch.uint8)
    assert differ.float().mean() < 1e-3
    assert error_of(unscaled(found), unscaled(right)) < 2e-3


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [2, 5, 64, 406])
def test_rows_become_e4m3(kernels: Kernels, layout: str, rows: int) -> None:
    for inner, _ in SHAPES:
        weight = random_weight(layout, 128, inner, seed=1)
        x, residual = randn(rows, inner, seed=2) * 3, randn(rows, inner, seed=3)
        norm, bias = randn(inner, seed=4), randn(inner, seed=5)
        agree(kernels.scale_inputs(x, weight), scale_inputs(x, weight))
        for added in (None, residual):
            found, total = kernels.scaled_rms_norm(x, added, norm, 1e-6, weight)
            right, right_total = reference_scaled.scaled_rms_norm(x, added, norm, 1e-6, weight)
            assert torch.equal(total, right_total)
            assert error_of(unscaled(found), unscaled(right)) < 3e-3, "norms round sums in another order"
            found, total = kernels.scaled_layer_norm(x, added, norm, bias, 1e-6, weight)
            right, right_total = reference_scaled.scaled_layer_norm(x, added, norm, bias, 1e-6, weight)
            assert torch.equal(total, right_total)
            assert error_of(unscaled(found), unscaled(right)) < 3e-3
        for kind in ACTIVATIONS:
            wide = randn(rows, 2 * inner, seed=6)
            found = kernels.scaled_gated_activation(wide, kind, weight)
            assert (
                error_of(unscaled(found), unscaled(reference_scaled.scaled_gated_activation(wide, kind, weight))) < 4e-3
            )
            found = kernels.scaled_activation(x, kind, weight)
            assert error_of(unscaled(found), unscaled(reference_scaled.scaled_activation(x, kind, weight))) < 4e-3


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [2, 3, 8, 64, 406, 1024])
def test_products(kernels: Kernels, layout: str, rows: int) -> None:
    for inner, width in SHAPES:
        weight, bias = random_weight(layout, width, inner, seed=7), randn(width, seed=8)
        x = kernels.scale_inputs(randn(rows, inner, seed=9), weight)
        for added in (None, bias):
            right = reference_scaled.scaled_linear(x, weight, added)
            assert error_of(kernels.scaled_linear(x, weight, added), right) < 5e-3
            out = torch.full((rows, width), float("nan"), device=CUDA, dtype=torch.bfloat16)
            assert kernels.scaled_linear(x, weight, added, out) is out
            assert error_of(out, right) < 5e-3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_non_finite_row_spoils_only_itself(kernels: Kernels, layout: str) -> None:
    weight = random_weight(layout, 256, 512, seed=10)
    x = randn(8, 512, seed=11)
    right = kernels.multiply(x, weight)
    x[3, 5], x[6, 9] = float("nan"), float("inf")
    found = kernels.multiply(x, weight)
    others = [0, 1, 2, 4, 5, 7]
    assert torch.equal(found[others], right[others])
    assert found[3].isnan().all(), "NaN stays NaN"
    if layout != "given":
        assert not found[6].isfinite().all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_single_row(kernels: Kernels, layout: str) -> None:
    for inner, width in SHAPES:
        weight, bias = random_weight(layout, width, inner, seed=12), randn(width, seed=13)
        x = randn(1, inner, seed=14)
        assert error_of(kernels.row_linear(x, weight, bias), reference_scaled.row_linear(x, weight, bias)) < 3e-3
        assert error_of(kernels.row_gated_linear(x, weight), reference_scaled.row_gated_linear(x, weight)) < 5e-3


@pytest.mark.parametrize("layout", ["plain", "rows", "blocks"])
def test_a_single_row_whose_norm_is_pending(kernels: Kernels, layout: str) -> None:
    for inner, width in SHAPES:
        weight, bias = random_weight(layout, width, inner, seed=12), randn(width, seed=13)
        x, residual, norm = (randn(1, inner, seed=s) for s in (14, 15, 16))
        for added in (None, residual):
            pair = [Pending(x, added, torch.full_like(x, float("nan")), norm[0], 1e-6, 0.0) for _ in range(2)]
            found = kernels.pending_linear(pair[0], weight, bias)
            assert error_of(found, reference_scaled.pending_linear(pair[1], weight, bias)) < 5e-3
            found = kernels.pending_gated_linear(pair[0], weight)
            assert error_of(found, reference_scaled.pending_gated_linear(pair[1], weight)) < 7e-3
            assert added is None or torch.equal(pair[0].total, x + residual)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts(kernels: Kernels, layout: str) -> None:
    experts = random_weight(layout, 6, 384, 512, seed=15)
    for counts in ([7, 0, 130, 1, 64, 0], [0, 0, 0, 0, 0, 9], [50, 50, 50, 50, 50, 50]):
        ends = torch.tensor(counts, device=CUDA).cumsum(0).to(torch.int32)
        x = kernels.scale_inputs(randn(sum(counts), 512, seed=16), experts)
        found = kernels.scaled_grouped_linear(x, experts, ends)
        start, wide = 0, unscaled(x)
        for count, matrix in zip(counts, matrix_of(experts), strict=True):
            if count:
                assert error_of(found[start : start + count], wide[start : start + count] @ matrix.T) < 5e-3
            start += count

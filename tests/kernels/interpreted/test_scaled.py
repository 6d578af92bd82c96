"""e4m3 rows and products against their oracles, at various widths.

The interpreter rounds subnormal e4m3 numbers and those near a power of two differently, and has no e4m3 NaN. So these
tests accept a few wrong numbers; the tests on a GPU accept none. The interpreter reads e4m3 exactly, so products must
be right to the last places.
"""

import pytest
import torch
from torch import Tensor

from saccade.kernels import reference_scaled, scaled, vectors
from saccade.kernels.reference_vision import ACTIVATIONS
from saccade.kernels.weight import Layout, Pending, Scaled, Weight, new_weight, scale_inputs
from tests.kernels.cases import randn

WIDTHS = [100, 384, 1152]  # without and with a tail
FORMS = ["rows", "given", "blocks"]
STEP = 0.13  # relative distance between neighbouring e4m3 numbers
SMALLEST = 2.0**-6  # normal e4m3 number
MAX_OFF = 0.05  # a misplaced tail would make more numbers wrong than this


def weight_for(form: str, width: int) -> Weight:
    layout = Layout.BLOCKS if form == "blocks" else Layout.ROWS
    made = new_weight(
        128, width, layout=layout, dtype=torch.float32, device=torch.device("cpu"), has_input_scale=form == "given"
    )
    if made.input_scale is not None:
        made.input_scale.fill_(0.011)
    return made


def assert_same(found: Scaled, right: Scaled) -> None:
    torch.testing.assert_close(found.scales, right.scales, rtol=1e-4, atol=0.0)
    is_off = (found.data.float() - right.data.float()).abs() > STEP * right.data.float().abs() + SMALLEST
    assert is_off.float().mean() < MAX_OFF, is_off.float().mean()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("width", WIDTHS)
def test_rows(width: int, form: str) -> None:
    weight = weight_for(form, width)
    x, residual = (randn(3, width, seed=s) + 0.3 for s in (1, 2))
    scale, bias = (randn(width, seed=s) for s in (3, 4))
    assert_same(scaled.scale_inputs(x, weight), scale_inputs(x, weight))
    for kind in ACTIVATIONS if width == WIDTHS[0] else ("silu",):
        assert_same(scaled.scaled_activation(x, kind, weight), reference_scaled.scaled_activation(x, kind, weight))
        both = torch.cat([x, residual], dim=1)
        found = scaled.scaled_gated_activation(both, kind, weight)
        assert_same(found, reference_scaled.scaled_gated_activation(both, kind, weight))
    for added in (None, residual):
        for found_pair, right_pair in (
            (
                scaled.scaled_rms_norm(x, added, scale, 1e-6, weight, offset=1.0),
                reference_scaled.scaled_rms_norm(x, added, scale, 1e-6, weight, offset=1.0),
            ),
            (
                scaled.scaled_layer_norm(x, added, scale, bias, 1e-6, weight),
                reference_scaled.scaled_layer_norm(x, added, scale, bias, 1e-6, weight),
            ),
        ):
            assert_same(found_pair[0], right_pair[0])
            torch.testing.assert_close(found_pair[1], right_pair[1])


def random_weight(layout: Layout, num_columns: int, inner: int, dtype: torch.dtype = torch.float32) -> Weight:
    made = new_weight(num_columns, inner, layout=layout, dtype=dtype, device=torch.device("cpu"))
    made.fill(randn(num_columns, inner, seed=5) * randn(num_columns, 1, seed=6).exp())
    return made


def error_of(found: Tensor, right: Tensor) -> float:
    return float((found - right).norm() / right.norm())


@pytest.mark.parametrize("layout", [Layout.ROWS, Layout.BLOCKS])
@pytest.mark.parametrize(("num_columns", "inner"), [(21, 100), (141, 100), (21, 300)], ids=["narrow", "wide", "long"])
def test_a_single_row(layout: Layout, num_columns: int, inner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles depend on the shape. A small block keeps the test short."""
    monkeypatch.setattr(vectors, "_BLOCK", 128)
    x, bias = randn(1, inner, seed=7), randn(num_columns, seed=8)
    weight, both = random_weight(layout, num_columns, inner), random_weight(layout, 150, inner)
    out = torch.full((1, num_columns + 5), float("nan"))
    found = scaled.row_linear(x, weight, bias, out[:, :num_columns])
    assert error_of(found, reference_scaled.row_linear(x, weight, bias)) < 1e-5
    assert out[:, num_columns:].isnan().all()
    if inner > vectors._BLOCK:
        assert error_of(scaled.row_gated_linear(x, both), reference_scaled.row_gated_linear(x, both)) < 1e-5


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("layout", list(Layout))
def test_a_single_row_whose_norm_is_pending(layout: Layout, has_residual: bool) -> None:
    """In half precision, the only dtype of pending rows. Without a residual, nothing is written to the sum."""
    half = torch.float16
    x, residual, scale = (randn(1, 300, seed=s, dtype=half) for s in (1, 2, 3))
    weight, bias = random_weight(layout, 42, 300, half), randn(42, seed=9, dtype=half)
    pair = [
        Pending(
            x, residual if has_residual else None, torch.full((1, 300), float("nan"), dtype=half), scale[0], 1e-6, 0.5
        )
        for _ in range(2)
    ]
    for found, right in (
        (scaled.pending_linear(pair[0], weight, bias), reference_scaled.pending_linear(pair[1], weight, bias)),
        (scaled.pending_gated_linear(pair[0], weight), reference_scaled.pending_gated_linear(pair[1], weight)),
    ):
        assert error_of(found.float(), right.float()) < 2e-3
    totals = [pending.total for pending in pair]
    assert torch.equal(*totals) if has_residual else all(total.isnan().all() for total in totals)


@pytest.mark.parametrize(("rows", "num_columns", "inner"), [(2, 50, 100), (5, 130, 384), (64, 33, 384)])
def test_a_few_rows(rows: int, num_columns: int, inner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled, "_FEW_COLUMNS", 64)
    weight, bias = random_weight(Layout.ROWS, num_columns, inner), randn(num_columns, seed=8)
    x = scale_inputs(randn(rows, inner, seed=7), weight)
    out = torch.full((rows, num_columns + 5), float("nan"))
    found = scaled.scaled_linear(x, weight, bias, out[:, :num_columns])
    assert error_of(found, reference_scaled.scaled_linear(x, weight, bias)) < 1e-5
    assert out[:, num_columns:].isnan().all()


@pytest.mark.parametrize(("layout", "major"), [(Layout.ROWS, 8), (Layout.BLOCKS, 8), (Layout.BLOCKS, 12)])
def test_many_rows_where_torch_has_no_product(layout: Layout, major: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled, "_major", lambda device: major)
    monkeypatch.setattr(torch, "_scaled_mm", None)
    weight, bias = random_weight(layout, 128, 384), randn(128, seed=8)
    x = scale_inputs(randn(68, 384, seed=7), weight)
    out = torch.full((68, 133), float("nan"))
    found = scaled.scaled_linear(x, weight, bias, out[:, :128])
    assert error_of(found, reference_scaled.scaled_linear(x, weight, bias)) < 1e-5
    assert out[:, 128:].isnan().all()


@pytest.mark.parametrize(("dtype", "major"), [(torch.float32, 9), (torch.float16, 10), (torch.bfloat16, 8)])
def test_experts_where_torch_has_no_product(dtype: torch.dtype, major: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose bfloat16 the interpreter rounds wrongly."""
    monkeypatch.setattr(scaled, "_major", lambda device: major)
    monkeypatch.setattr(reference_scaled, "grouped_linear", None)
    x, weight = randn(90, 200, seed=9).to(dtype), randn(3, 130, 200, seed=8).to(dtype)
    parts = [part.float() @ each.float().t() for part, each in zip((x[:0], x[:70], x[70:]), weight, strict=True)]
    found = scaled.grouped_linear(x, weight, torch.tensor([0, 70, 90], dtype=torch.int32))
    assert found.dtype == dtype
    if dtype != torch.bfloat16:
        assert error_of(found.float(), torch.cat(parts)) < 1e-3


@pytest.mark.parametrize("layout", [Layout.ROWS, Layout.BLOCKS])
def test_experts(layout: Layout) -> None:
    made = new_weight(3, 130, 200, layout=layout, dtype=torch.float32, device=torch.device("cpu"))
    for seed, expert in enumerate(made.experts()):
        expert.fill(randn(130, 200, seed=seed))
    x, ends_E = scale_inputs(randn(90, 200, seed=9), made), torch.tensor([0, 70, 90], dtype=torch.int32)
    right = reference_scaled.scaled_grouped_linear(x, made, ends_E)
    assert error_of(scaled.scaled_grouped_linear(x, made, ends_E), right) < 1e-5

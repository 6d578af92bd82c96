"""Rows in e4m3 against their oracles: scales, and every number in its place, whatever the width.

The interpreter has its own way with the smallest numbers of e4m3 and with those that are rounded up to a power of two,
and it knows no NaN there: most numbers must be right, and the GPU's tests ask for all.
"""

import pytest
import torch

from saccade.kernels import reference_scaled, scaled
from saccade.kernels.weight import Layout, Scaled, Weight, new_weight, scale_inputs
from tests.kernels.cases import randn

WIDTHS = [100, 384, 1152]  # without a tail, and with one
FORMS = ["rows", "given", "blocks"]
STEP = 0.13  # between neighbours of e4m3, of the number
SMALLEST = 2.0**-6  # of the normal numbers
MOST_OFF = 0.05  # a tail of a row in the wrong place would be 6 % of it, and nearly all wrong where it is longer


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
    assert is_off.float().mean() < MOST_OFF, is_off.float().mean()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("width", WIDTHS)
def test_rows(width: int, form: str) -> None:
    weight = weight_for(form, width)
    x, residual = (randn(3, width, seed=s) + 0.3 for s in (1, 2))
    scale, bias = (randn(width, seed=s) for s in (3, 4))
    assert_same(scaled.scale_inputs(x, weight), scale_inputs(x, weight))
    for kind in ("silu", "gelu_tanh", "gelu"):
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

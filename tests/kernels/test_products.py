"""Which kernel a matrix product uses, and that all compute the same."""

from typing import Any

import pytest
import torch
from torch import Tensor

from saccade.kernels import reference
from saccade.kernels.products import HopperProducts, Kind, Tile, choose

# Kind and shape (rows, columns, inner) for which a tile, or cuBLAS, was clearly faster on one H200.
CLEAR_WINS: list[tuple[Kind, int, int, int]] = [
    ("plain", 384, 4096, 4096),
    ("plain", 416, 6144, 4096),
    ("plain", 416, 4096, 4096),
    ("plain", 416, 24576, 4096),
    ("plain", 448, 24576, 4096),
    ("plain", 832, 6144, 4096),
    ("plain", 832, 4096, 12288),
    ("plain", 2048, 6144, 4096),
    ("gated", 1024, 24576, 4096),
    ("gated", 8192, 24576, 4096),
    ("gelu_tanh", 1408, 4304, 1152),
    ("gelu_tanh", 41472, 4304, 1152),
    ("bias", 10368, 3456, 1152),
]
CLEAR_LOSSES: list[tuple[Kind, int, int, int]] = [
    ("plain", 64, 24576, 4096),
    ("plain", 160, 4096, 12288),
    ("plain", 320, 4096, 4096),
    ("plain", 512, 4096, 4096),
    ("gated", 320, 24576, 4096),
    ("gated", 416, 24576, 4096),
    ("plain", 8192, 4096, 12288),
    ("bias", 1408, 1152, 1152),
    ("bias", 41472, 1152, 4304),
]


@pytest.mark.parametrize(("kind", "m", "n", "k"), CLEAR_WINS)
def test_shapes_that_cublas_lost_get_a_tile(kind: Kind, m: int, n: int, k: int) -> None:
    assert choose(kind, m, n, k) is not None


@pytest.mark.parametrize(("kind", "m", "n", "k"), CLEAR_LOSSES)
def test_shapes_that_cublas_won_stay_with_it(kind: Kind, m: int, n: int, k: int) -> None:
    assert choose(kind, m, n, k) is None


def test_rows_that_hardware_cannot_address_stay_with_cublas() -> None:
    assert choose("plain", 1024, 4100, 4096) is None
    assert choose("plain", 1024, 4096, 4100) is None


def test_time_counts_whole_waves_of_tiles() -> None:
    tile = Tile(128, 256, (1, 1))
    one_wave = tile.microseconds(128 * 132, 256, 4096)
    assert tile.microseconds(128 * 66, 256, 4096) == one_wave
    assert tile.microseconds(128 * 133, 256, 4096) > 1.9 * one_wave


def test_few_rows_take_a_narrow_tile_that_they_fill() -> None:
    """With narrow tiles there are more of them, so a product of few rows keeps all multiprocessors busy."""
    narrow = choose("plain", 416, 4096, 12288)
    assert narrow is not None and narrow.columns == 112
    assert choose("plain", 400, 4096, 12288) is None, "four tiles of 112 columns would be empty by a tenth"


class Recorder:
    """Stands in for quack: computes with torch and records its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def plain(self, x: Tensor, weight: Tensor, out: Tensor, *, bias: Tensor | None, config: Any, split_k: int) -> None:
        self.calls.append((config, split_k))
        out.copy_(reference.linear(x, weight.t(), bias))

    def activated(self, x: Tensor, weight: Tensor, *, activation: str, postact_out: Tensor, **more: Any) -> None:
        self.calls.append((more["config"], activation, more.get("concat_layout")))
        assert more["store_preact"] is False and more["tuned"] is False
        if activation == "swiglu":
            postact_out.copy_(reference.gated_linear(x, weight.t(), "silu"))
        else:
            postact_out.copy_(reference.activated_linear(x, weight.t(), more["bias"], "gelu_tanh"))


class AnyConfig(dict[Tile, str]):
    def __missing__(self, tile: Tile) -> str:
        return f"{tile.rows}x{tile.columns}"


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def products(recorder: Recorder) -> HopperProducts:
    pytest.importorskip("triton")
    return HopperProducts(recorder.plain, recorder.activated, AnyConfig())


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_cublas_and_tiles_compute_the_same_product(products: HopperProducts, recorder: Recorder) -> None:
    weight, bias = random(3456, 1152), random(3456)
    for rows in (100, 2816):
        x, out = random(rows, 1152), torch.empty(rows, 3456)
        expected = reference.linear(x, weight, bias)
        torch.testing.assert_close(products.linear(x, weight, bias), expected)
        assert products.linear(x, weight, bias, out) is out
        torch.testing.assert_close(out, expected)
    assert len(recorder.calls) == 2, "cuBLAS takes 100 rows, a tile 2816"


def test_activations_are_fused_into_the_product(products: HopperProducts, recorder: Recorder) -> None:
    x, weight = random(2048, 64), random(16384, 64)
    torch.testing.assert_close(products.gated_linear(x, weight, "silu"), reference.gated_linear(x, weight, "silu"))
    [(_, activation, layout)] = recorder.calls
    assert (activation, layout) == ("swiglu", ("B",)), "the rows of the weight are [gate | up], not interleaved"
    x, weight, bias = random(1408, 1152), random(4304, 1152), random(4304)
    activated = products.activated_linear(x, weight, bias, "gelu_tanh")
    torch.testing.assert_close(activated, reference.activated_linear(x, weight, bias, "gelu_tanh"))
    assert recorder.calls[-1][1] == "gelu_tanh_approx"


def test_noncontiguous_rows_stay_with_cublas(products: HopperProducts, recorder: Recorder) -> None:
    x = random(2816, 2304)[:, :1152]
    weight = random(3456, 1152)
    torch.testing.assert_close(products.linear(x, weight), reference.linear(x, weight))
    assert recorder.calls == []

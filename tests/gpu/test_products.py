"""bfloat16 matrix products on Hopper, by the kernel chosen for each shape, against float32."""

import pytest
import torch
from torch import Tensor

from saccade.kernels import reference
from saccade.kernels.dispatch import Kernels, kernels_for
from saccade.kernels.products import Kind, choose

BF16 = torch.bfloat16
SHAPES: list[tuple[Kind, int, int]] = [
    ("plain", 6144, 4096),
    ("plain", 4096, 12288),
    ("plain", 4608, 3584),  # Qwen2.5-VL-7B
    ("bias", 3456, 1152),
    ("bias", 1152, 4304),
    ("gated", 24576, 4096),
    ("gated", 37888, 3584),
    ("gelu_tanh", 4304, 1152),
]
ROWS = (1, 77, 384, 416, 448, 640, 832, 1000, 1504, 4096)


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    found = kernels_for("cuda", BF16)
    if "quack" not in found.name:
        pytest.skip(found.reasons["linear"])
    return found


def compute(kernels: Kernels, kind: Kind, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if kind == "gated":
        return kernels.gated_linear(x, weight, "silu")
    if kind == "gelu_tanh":
        return kernels.activated_linear(x, weight, bias, "gelu_tanh")
    return kernels.linear(x, weight, bias if kind == "bias" else None)


def expect(kind: Kind, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    x, weight, bias = x.float(), weight.float(), bias.float()
    if kind == "gated":
        return reference.gated_linear(x, weight, "silu")
    if kind == "gelu_tanh":
        return reference.activated_linear(x, weight, bias, "gelu_tanh")
    return reference.linear(x, weight, bias if kind == "bias" else None)


@pytest.mark.parametrize(("kind", "n", "k"), SHAPES)
def test_products_are_right_at_every_row_count_and_ignore_poisoned_rows(
    kernels: Kernels, kind: Kind, n: int, k: int
) -> None:
    on_device = torch.Generator("cuda").manual_seed(n + k)
    weight = torch.randn(n, k, generator=on_device, device="cuda", dtype=BF16) * k**-0.5
    bias = torch.randn(n, generator=on_device, device="cuda", dtype=BF16)
    for rows in ROWS:
        x = torch.randn(rows, k, generator=on_device, device="cuda", dtype=BF16)
        expected = expect(kind, x, weight, bias)
        for poisoned in (0, rows // 3):
            if poisoned:
                x[-poisoned:] = float("nan")
            valid = rows - poisoned
            y = compute(kernels, kind, x, weight, bias)[:valid].float()
            error = float((y - expected[:valid]).norm() / expected[:valid].norm())
            assert error < 4e-3, f"{kind} of {rows} x {n} x {k} ({choose(kind, rows, n, k)}): {error}"


def test_a_replayed_product_equals_the_call_to_the_last_bit(kernels: Kernels) -> None:
    on_device = torch.Generator("cuda").manual_seed(0)
    x = torch.empty(416, 12288, device="cuda", dtype=BF16)
    weight = torch.randn(4096, 12288, generator=on_device, device="cuda", dtype=BF16)
    assert choose("plain", 416, 4096, 12288) is not None
    kernels.linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernels.linear(x, weight)
    for _ in range(20):
        x.normal_(generator=on_device)
        graph.replay()
        assert torch.equal(y, kernels.linear(x, weight))

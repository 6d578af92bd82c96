"""Matrix products of Qwen3-VL-8B: cuBLAS against the tiles that `saccade.kernels.products` chooses, in one run.

`python -m tests.gpu.profile_products` prints microseconds, each from a graph of eight calls over several weights (so
that none is in cache). Both sides include the activation that follows a product.
"""

from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from saccade.kernels import fused, fused_vision, reference
from saccade.kernels.products import Kind, choose, load_products

LANGUAGE_ROWS = (1, 256, 416, 512, 640, 832, 1024, 2048, 4096, 8192)
VISION_ROWS = (1344, 2688, 10368, 41472)
SHAPES: list[tuple[str, Kind, int, int, tuple[int, ...]]] = [
    ("q, k, v", "plain", 6144, 4096, LANGUAGE_ROWS),
    ("attention out", "plain", 4096, 4096, LANGUAGE_ROWS),
    ("gate, up, silu", "gated", 24576, 4096, LANGUAGE_ROWS),
    ("down", "plain", 4096, 12288, LANGUAGE_ROWS),
    ("vision q, k, v", "bias", 3456, 1152, VISION_ROWS),
    ("vision out", "bias", 1152, 1152, VISION_ROWS),
    ("vision up, gelu", "gelu_tanh", 4304, 1152, VISION_ROWS),
    ("vision down", "bias", 1152, 4304, VISION_ROWS),
]
NUM_CALLS, NUM_WEIGHTS, NUM_ROUNDS = 8, 3, 5

Product = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    products = load_products()
    if isinstance(products, str):
        raise SystemExit(products)
    ours: dict[Kind, Product] = {
        "plain": lambda x, w, b: products.linear(x, w),
        "bias": products.linear,
        "gated": lambda x, w, b: products.gated_linear(x, w, "silu"),
        "gelu_tanh": lambda x, w, b: products.activated_linear(x, w, b, "gelu_tanh"),
    }
    theirs: dict[Kind, Product] = {
        "plain": lambda x, w, b: reference.linear(x, w),
        "bias": reference.linear,
        "gated": lambda x, w, b: fused.gated_activation(reference.linear(x, w), "silu"),
        "gelu_tanh": lambda x, w, b: fused_vision.activated_linear(x, w, b, "gelu_tanh"),
    }
    table = Table("product", "rows", "cuBLAS us", "ours us", "ratio", "TFLOP/s", "tile")
    for name, kind, n, k, all_rows in SHAPES:
        for m in all_rows:
            tile = choose(kind, m, n, k)
            cublas = microseconds(theirs[kind], m, n, k)
            chosen = microseconds(ours[kind], m, n, k) if tile is not None or m == 1 else cublas
            shown = ("cuBLAS" if m > 1 else "one row") if tile is None else f"{tile.rows}x{tile.columns}"
            figures = (
                f"{cublas:.1f}",
                f"{chosen:.1f}",
                f"{cublas / chosen:.2f}",
                f"{2 * m * n * k / chosen / 1e6:.0f}",
            )
            table.add_row(name, str(m), *figures, shown)
    Console(width=120).print(table)


def microseconds(product: Product, m: int, n: int, k: int) -> float:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    x, bias, weights = random(m, k), random(n), [random(n, k) * k**-0.5 for _ in range(NUM_WEIGHTS)]
    product(x, weights[0], bias)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(NUM_CALLS):
            product(x, weights[i % NUM_WEIGHTS], bias)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_ROUNDS + 1)]
    graph.replay()
    for mark in marks:
        mark.record()
        graph.replay()
    torch.cuda.synchronize()
    times = [float(before.elapsed_time(after)) for before, after in pairwise(marks)]
    return median(times) / NUM_CALLS * 1e3


if __name__ == "__main__":
    main()

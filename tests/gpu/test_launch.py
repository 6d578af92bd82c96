"""Direct launches of Triton kernels give what ordinary ones give, with Triton's own launcher."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from saccade.kernels import fused
from saccade.kernels.launch import Launcher
from saccade.kernels.triton_fused import gated_kernel, norm_kernel


def rows(num_rows: int, width: int, shift: int, *, seed: int) -> Tensor:
    """Random rows at an address that is a multiple of 16 bytes only without a shift."""
    rng = torch.Generator("cuda").manual_seed(seed)
    flat = torch.randn(num_rows * width + shift, generator=rng, device="cuda", dtype=torch.bfloat16)
    return flat[shift:].view(num_rows, width)


def norm(x: Tensor) -> Tensor:
    return fused.rms_norm(x, torch.full_like(x[0], 1.5), 1e-6)


def gate(x: Tensor) -> Tensor:
    return fused.gated_activation(x, "silu")


@pytest.mark.parametrize(("kernel", "call"), [(norm_kernel, norm), (gated_kernel, gate)])
def test_direct_launches_give_what_ordinary_ones_give(kernel: Launcher, call: Callable[[Tensor], Tensor]) -> None:
    side = torch.cuda.Stream()
    shapes = [(num_rows, width, shift) for num_rows in (1, 16, 37) for width in (48, 4096) for shift in (0, 1, 8)]
    kernel._cached.clear()
    ordinary = [call(rows(*shape, seed=i)) for i, shape in enumerate(shapes)]
    assert 0 < len(kernel._cached) <= len(shapes)
    known = dict(kernel._cached)
    again = [rows(*shape, seed=i) for i, shape in enumerate(shapes)]
    direct = [call(x) for x in again]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        beside = [call(x) for x in again]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [call(x) for x in again]
    graph.replay()
    assert kernel._can_cache and kernel._cached == known, "all but the first of each kind were direct"
    for right, *others in zip(ordinary, direct, beside, captured, strict=True):
        assert right.isfinite().all() and right.any()
        assert all(torch.equal(right, other) for other in others)

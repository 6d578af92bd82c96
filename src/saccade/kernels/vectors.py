"""Products with one row (a decode step of a single request), bound by reading the weights once. `python -m
tests.gpu.profile_products` compares them with cuBLAS."""

import torch
import triton
from torch import Tensor

from saccade.kernels.overlap import overlapping
from saccade.kernels.triton_vectors import vector_kernel

_HALF = (torch.float16, torch.bfloat16)
_COLUMNS = 2  # per program: more would leave multiprocessors idle, one would read the row too often
_BLOCK = 4096


def is_vector(x: Tensor, weight: Tensor) -> bool:
    """Whether `vector_linear` supports this product."""
    return x.shape[0] == 1 and x.dim() == 2 and x.dtype in _HALF and weight.is_contiguous() and weight.shape[1] % 8 == 0


def vector_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """See `reference.linear`."""
    y = torch.empty((1, weight.shape[0]), dtype=x.dtype, device=x.device) if out is None else out
    return _launch(x, weight, bias, y, is_gated=False)


def vector_gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    """See `reference.gated_linear`; SiLU only."""
    y = torch.empty((1, weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    return _launch(x, weight, None, y, is_gated=True)


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, *, is_gated: bool) -> Tensor:
    assert x.stride(1) == 1 and y.stride(1) == 1, (x.stride(), y.stride())
    inner = weight.shape[1]
    vector_kernel[(triton.cdiv(y.shape[1], _COLUMNS),)](
        x,
        weight,
        weight if bias is None else bias,
        y,
        y.shape[1],
        K=inner,
        GATED=is_gated,
        HAS_BIAS=bias is not None,
        COLUMNS=_COLUMNS,
        BLOCK=min(_BLOCK, triton.next_power_of_2(inner)),
        num_warps=4,
        **overlapping(x),
    )
    return y

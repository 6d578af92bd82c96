# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Kernels that begin before the one in front of them is done: programmatic dependent launch, on Hopper and later.

Between two kernels of a stream a GPU idles for a microsecond or two, and a pass over few rows consists of hundreds of
small kernels. A kernel launched with `overlapping` is set up meanwhile, and waits at `await_inputs` for all that the
kernels before it wrote.

The rule that makes it safe: every program calls `await_inputs` before it reads or writes anything that another kernel
writes or reads, also a program that has nothing to do. Only weights may be read earlier. Then a kernel that is done
implies that all kernels before it are done, and whoever waits for it need not know of them.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from saccade.kernels.dispatch import is_hopper

_ON: dict[str, Any] = {"OVERLAPS": True, "launch_pdl": True}
_OFF: dict[str, Any] = {"OVERLAPS": False}


@triton.jit
def await_inputs(OVERLAPS: tl.constexpr):
    """Wait for the kernels before this one; from now on the next one may be set up."""
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()


def overlapping(x: Tensor) -> dict[str, Any]:
    """Keywords for the launch of a kernel that calls `await_inputs`, on the device of x."""
    return _ON if _can_overlap(x.device) else _OFF


@lru_cache
def _can_overlap(device: torch.device) -> bool:
    return device.type == "cuda" and is_hopper(device)

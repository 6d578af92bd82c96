# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Programmatic dependent launch on Hopper and later: a kernel starts before its predecessor is done.

A GPU idles for a microsecond or two between two kernels of a stream, and a pass over few rows runs hundreds of small
kernels. A kernel launched with `overlapping` is set up during that time, then waits in `await_inputs` for its
predecessors' writes.

Safety rule: every program, even one with nothing to do, calls `await_inputs` before it reads or writes anything that
another kernel writes or reads. Only weights may be read earlier. So once a kernel is finished, so are all before it.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from saccade.kernels.dispatch import gpu_for, is_hopper

_ON: dict[str, Any] = {"OVERLAPS": True, "launch_pdl": True}
_OFF: dict[str, Any] = {"OVERLAPS": False}


@triton.jit
def await_inputs(OVERLAPS: tl.constexpr):
    """Waits for all earlier kernels, and lets the next one be set up."""
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()


def overlapping(x: Tensor) -> dict[str, Any]:
    """Launch keywords for a kernel on the device of x that calls `await_inputs`."""
    return _ON if _can_overlap(x.device) else _OFF


@lru_cache
def _can_overlap(device: torch.device) -> bool:
    found = gpu_for(device)
    return found is not None and is_hopper(found)

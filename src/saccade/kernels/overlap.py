# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Programmatic dependent launch, on Hopper and later: a kernel starts before its predecessor is done.

A GPU idles for a microsecond or two between kernels of a stream, and a pass over few rows has hundreds of small ones. A
kernel launched with `overlapping` is set up in that time, then waits in `await_inputs` for its predecessors' writes.

Safety rules. Every program, even one with nothing to do, calls `await_inputs` before it writes anything, and before it
reads what its predecessor in the stream wrote: then a finished kernel implies that all kernels before it are finished.
Weights may be read earlier. So may what is older than the predecessor, if that one is no early starter: its programs
have all waited for the kernels before it when the next one starts. An early starter lets the next one start before it
has waited itself, so that a product behind it reads weights in the meantime.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from saccade.kernels.dispatch import gpu_for, is_hopper

_ON: dict[str, Any] = {"OVERLAPS": 1, "launch_pdl": True}
_EARLY: dict[str, Any] = {"OVERLAPS": 2, "launch_pdl": True}
_OFF: dict[str, Any] = {"OVERLAPS": 0}


@triton.jit
def await_inputs(OVERLAPS: tl.constexpr):
    """Waits for all earlier kernels, and lets the next one be set up: before the wait with OVERLAPS of 2."""
    if OVERLAPS == 2:
        gdc_launch_dependents()
        gdc_wait()
    elif OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()


def overlapping(x: Tensor, *, is_early: bool = False) -> dict[str, Any]:
    """Launch keywords for a kernel that calls `await_inputs`, on the device of x. Behind an early starter, nothing but
    weights may be read before the wait."""
    if not _can_overlap(x.device):
        return _OFF
    return _EARLY if is_early else _ON


@lru_cache
def _can_overlap(device: torch.device) -> bool:
    found = gpu_for(device)
    return found is not None and is_hopper(found)

"""Triton attention: supports every call, on any recent GPU and in any float dtype.

Boundaries stay on the device; launch parameters depend only on capacities. Rows of a segment past `max_seqlen`, or of a
request past `max_query`, are not written.
"""

from typing import Any

import torch
from torch import Tensor

from saccade.kernels.backends import AttendPacked, AttendPaged, PackedCall, PagedCall
from saccade.kernels.grids import cdiv, next_power_of_2
from saccade.kernels.overlap import overlapping
from saccade.kernels.triton_attention import combine_kernel, paged_kernel, varlen_kernel

SHORT_SEGMENT = 64  # one tile, so the kernel reads the segment once without a loop
_TARGET_PROGRAMS = 256  # about two per multiprocessor of the largest GPUs
_MAX_SPLITS = 32
_MIN_KEYS_PER_SPLIT = 256


class TritonAttention:
    """Tuned for short segments and for few rows over many keys; other backends are faster elsewhere."""

    name = "triton"

    def packed(self, call: PackedCall) -> AttendPacked:
        longest = call.max_seqlen
        block_m = 16 if call.dtype == torch.float32 else max(16, min(SHORT_SEGMENT, next_power_of_2(longest)))
        options = {
            **_common(call),
            "CAUSAL": call.causal,
            "BLOCK_M": block_m,
            "BLOCK_N": block_m if call.head_width <= 128 else min(block_m, 32),
            "num_warps": 4,
            "num_stages": 1 if longest <= SHORT_SEGMENT else 2,
        }
        grid = (cdiv(min(longest, call.num_rows), block_m), call.num_heads, call.num_segments)

        def attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float) -> Tensor:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            strides = [stride for x in (q, k, v, out) for stride in x.stride()[:2]]
            varlen_kernel[grid](q, k, v, out, starts, *strides, scale, **options, **overlapping(q))
            return out

        return attend

    def paged(self, call: PagedCall) -> AttendPaged:
        """If few tiles have many keys, splits the keys over several programs and combines their results."""
        num_queries = min(call.max_query, call.num_rows)
        share = call.num_heads // call.num_groups
        block_m, block_n = _paged_tile(num_queries * share, call.head_width, call.dtype)
        num_tiles = cdiv(num_queries * share, block_m)
        reach = call.max_keys if call.window is None else min(call.max_keys, call.window + call.max_query)
        splits = choose_splits(num_tiles * call.num_groups * call.num_requests, reach)
        options = {
            **_common(call),
            "SPLITS": splits,
            "BLOCK_SIZE": call.block_size,
            "WINDOW": call.window or 0,
            "HAS_LIMITS": call.has_limits,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "num_warps": 8 if block_m >= 128 else 4,
            "num_stages": 2,
        }
        grid = (num_tiles * splits, call.num_groups, call.num_requests)

        def attend(
            q: Tensor,
            caches: tuple[Tensor, Tensor],
            requests: tuple[Tensor, Tensor, Tensor],
            limits: Tensor | None,
            scale: float,
        ) -> Tensor:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            partial = lse = out  # pointers, not read
            if splits > 1:
                partial = torch.empty((splits, *q.shape), dtype=torch.float32, device=q.device)
                lse = partial.new_empty(partial.shape[:-1])  # log-sum-exps of the partial outputs, base 2
            strides = [*q.stride()[:2], *caches[0].stride()[:3], *caches[1].stride()[:3], *out.stride()[:2]]
            paged_kernel[grid](
                q,
                *caches,
                out,
                *requests,
                requests[0] if limits is None else limits,
                partial,
                lse,
                *strides,
                requests[2].stride(0),
                *q.shape[:2],
                scale,
                **options,
                **overlapping(q),
            )
            if splits > 1:
                num_items = call.num_rows * call.num_heads
                combine_kernel[(num_items,)](
                    partial,
                    lse,
                    out,
                    num_items,
                    D=call.head_width,
                    SPLITS=splits,
                    D_BLOCK=next_power_of_2(call.head_width),
                    num_warps=2,
                    **overlapping(out),
                )
            return out

        return attend


def choose_splits(num_programs: int, max_keys: int) -> int:
    """How many programs share one tile's keys: a power of two that fills the GPU and keeps each program busy."""
    splits = 1
    while (
        splits < _MAX_SPLITS
        and num_programs * splits * 2 <= _TARGET_PROGRAMS
        and max_keys >= splits * 2 * _MIN_KEYS_PER_SPLIT
    ):
        splits *= 2
    return splits


def _paged_tile(num_items: int, head_width: int, dtype: torch.dtype) -> tuple[int, int]:
    """Rows and keys of one tile. Registers limit it for wide heads and for float32, which has no tensor cores."""
    if dtype == torch.float32:
        return 16, 32
    largest = 128 if head_width <= 128 else 64
    return max(16, min(largest, next_power_of_2(num_items))), 64 if head_width <= 128 else 32


def _common(call: PackedCall | PagedCall) -> dict[str, Any]:
    """float32 needs "ieee" precision: by default Triton rounds products to TF32."""
    return {
        "D": call.head_width,
        "SHARE": call.num_heads // call.num_groups,
        "PRECISION": "ieee" if call.dtype == torch.float32 else "tf32",
        "D_BLOCK": max(16, next_power_of_2(call.head_width)),
    }

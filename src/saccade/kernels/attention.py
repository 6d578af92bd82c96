"""Triton attention with the signatures of `saccade.kernels.reference`: every case, any recent GPU, any float.

Boundaries stay on the device; what a launch takes from the host is a function of capacities. Rows of a segment
past `max_seqlen`, or of a request past `max_query`, are not written.
"""

import torch
import triton
from torch import Tensor

from saccade.kernels.overlap import overlapping
from saccade.kernels.triton_attention import combine_kernel, paged_kernel, varlen_kernel

SHORT_SEGMENT = 64  # one tile: a segment this short is read once and never looped over
_WANTED_PROGRAMS = 256  # about two for each multiprocessor of the largest GPUs
_MOST_SPLITS = 32
_LEAST_KEYS_PER_SPLIT = 256


def varlen_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    cu_seqlens_S1: Tensor,
    max_seqlen: int,
    *,
    scale: float,
    causal: bool = False,
) -> Tensor:
    """See `reference.varlen_attention`. Made for short segments; long ones work but other kernels are faster."""
    num_rows, num_heads, head_width = q_THD.shape
    num_segments = cu_seqlens_S1.shape[0] - 1
    out = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    if num_rows == 0:
        return out
    block_m = 16 if q_THD.dtype == torch.float32 else max(16, min(SHORT_SEGMENT, triton.next_power_of_2(max_seqlen)))
    block_n = block_m if head_width <= 128 else min(block_m, 32)
    grid = (triton.cdiv(min(max_seqlen, num_rows), block_m), num_heads, num_segments)
    varlen_kernel[grid](
        q_THD,
        k_TGD,
        v_TGD,
        out,
        cu_seqlens_S1,
        *q_THD.stride()[:2],
        *k_TGD.stride()[:2],
        *v_TGD.stride()[:2],
        *out.stride()[:2],
        scale,
        D=head_width,
        SHARE=num_heads // k_TGD.shape[1],
        CAUSAL=causal,
        PRECISION=_dot_precision(q_THD),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        D_BLOCK=max(16, triton.next_power_of_2(head_width)),
        num_warps=4,
        num_stages=1 if max_seqlen <= SHORT_SEGMENT else 2,
        **overlapping(q_THD),
    )
    return out


def paged_attention(  # noqa: PLR0913
    q_THD: Tensor,
    k_cache_NBGD: Tensor,
    v_cache_NBGD: Tensor,
    query_start_R1: Tensor,
    key_lengths_R: Tensor,
    block_tables_RM: Tensor,
    *,
    max_query: int,
    max_keys: int,
    scale: float,
    window: int | None = None,
    limits_T: Tensor | None = None,
) -> Tensor:
    """See `reference.paged_attention`. Few tiles over many keys are split along the keys and joined after."""
    num_rows, num_heads, head_width = q_THD.shape
    num_groups, num_requests = k_cache_NBGD.shape[2], key_lengths_R.shape[0]
    share = num_heads // num_groups
    out = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    if num_rows == 0:
        return out
    block_m, block_n = _paged_tile(min(max_query, num_rows) * share, head_width, q_THD.dtype)
    num_tiles = triton.cdiv(min(max_query, num_rows) * share, block_m)
    reach = max_keys if window is None else min(max_keys, window + max_query)
    splits = choose_splits(num_tiles * num_groups * num_requests, reach)
    partial, lse = _split_buffers(q_THD, splits) if splits > 1 else (out, out)
    paged_kernel[(num_tiles * splits, num_groups, num_requests)](
        q_THD,
        k_cache_NBGD,
        v_cache_NBGD,
        out,
        query_start_R1,
        key_lengths_R,
        block_tables_RM,
        query_start_R1 if limits_T is None else limits_T,
        partial,
        lse,
        *q_THD.stride()[:2],
        *k_cache_NBGD.stride()[:3],
        *v_cache_NBGD.stride()[:3],
        *out.stride()[:2],
        block_tables_RM.stride(0),
        num_rows,
        num_heads,
        scale,
        D=head_width,
        SHARE=share,
        SPLITS=splits,
        BLOCK_SIZE=k_cache_NBGD.shape[1],
        WINDOW=0 if window is None else window,
        HAS_LIMITS=limits_T is not None,
        PRECISION=_dot_precision(q_THD),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        D_BLOCK=max(16, triton.next_power_of_2(head_width)),
        num_warps=8 if block_m >= 128 else 4,
        num_stages=2,
        **overlapping(q_THD),
    )
    if splits > 1:
        _combine(partial, lse, out)
    return out


def choose_splits(num_programs: int, max_keys: int) -> int:
    """How many programs share one tile's keys, as a power of two: enough to fill the GPU, each with real work."""
    splits = 1
    while (
        splits < _MOST_SPLITS
        and num_programs * splits * 2 <= _WANTED_PROGRAMS
        and max_keys >= splits * 2 * _LEAST_KEYS_PER_SPLIT
    ):
        splits *= 2
    return splits


def _paged_tile(num_items: int, head_width: int, dtype: torch.dtype) -> tuple[int, int]:
    """Rows and keys of one tile; wide heads and float32 (no tensor cores) get smaller tiles for want of registers."""
    if dtype == torch.float32:
        return 16, 32
    largest = 128 if head_width <= 128 else 64
    return max(16, min(largest, triton.next_power_of_2(num_items))), 64 if head_width <= 128 else 32


def _split_buffers(q_THD: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Partial outputs and their log-sum-exps (base 2)."""
    partial = torch.empty((splits, *q_THD.shape), dtype=torch.float32, device=q_THD.device)
    return partial, torch.empty(partial.shape[:-1], dtype=torch.float32, device=q_THD.device)


def _combine(partial: Tensor, lse: Tensor, out: Tensor) -> None:
    splits, num_rows, num_heads, head_width = partial.shape
    combine_kernel[(num_rows * num_heads,)](
        partial,
        lse,
        out,
        num_rows * num_heads,
        D=head_width,
        SPLITS=splits,
        SPLITS_BLOCK=splits,
        D_BLOCK=triton.next_power_of_2(head_width),
        num_warps=2,
        **overlapping(out),
    )


def _dot_precision(q: Tensor) -> str:
    """float32 products stay float32: Triton's default would round them to TF32."""
    return "ieee" if q.dtype == torch.float32 else "tf32"

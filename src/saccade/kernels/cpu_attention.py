"""Attention on a CPU: a loop over segments and requests.

The oracles compute every segment at its largest size, because a recorded operation has one shape: 8192 rows of 64
requests take gigabytes that way. Here each function is one operation, as a kernel is on a GPU. Whoever records it
records a single node, and boundaries, lengths and tables are read when the node runs, so that it does the work that is
there and its temporaries live no longer than the call.

L query rows and K keys of one request; T, S, R, H, G, D, N, B, M as in `reference_attention`.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from saccade.kernels import reference
from saccade.kernels.backends import LaunchPlan, PackedCall, PagedCall

_LIBRARY = torch.library.Library("saccade", "DEF")
_LIBRARY.define(
    "varlen_attention(Tensor q, Tensor k, Tensor v, Tensor starts, int longest, float scale, bool causal) -> Tensor"
)
_LIBRARY.define(
    "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor starts, Tensor lengths, Tensor tables, "
    "int max_query, int max_keys, float scale, int? window, Tensor? limits) -> Tensor"
)


@dataclass(frozen=True, slots=True)
class CpuAttention:
    name = "cpu_attention"
    cache_shape = staticmethod(reference.cache_shape)

    def plan_packed(self, call: PackedCall) -> LaunchPlan:
        return LaunchPlan({"longest": call.max_seqlen, "causal": call.causal})

    def attend_packed(
        self, plan: LaunchPlan, buffers: list[Tensor], q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float
    ) -> Tensor:
        result: Tensor = torch.ops.saccade.varlen_attention(q, k, v, starts, scale=scale, **plan.options)
        return result

    def plan_paged(self, call: PagedCall) -> LaunchPlan:
        return LaunchPlan({"max_query": call.max_query, "max_keys": call.max_keys, "window": call.window})

    def attend_paged(
        self,
        plan: LaunchPlan,
        buffers: list[Tensor],
        q: Tensor,
        caches: tuple[Tensor, Tensor],
        requests: tuple[Tensor, Tensor, Tensor],
        limits: Tensor | None,
        scale: float,
    ) -> Tensor:
        how = {**plan.options, "scale": scale, "limits": limits}
        result: Tensor = torch.ops.saccade.paged_attention(q, *caches, *requests, **how)
        return result


def _varlen(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, starts_S1: Tensor, longest: int, scale: float, causal: bool
) -> Tensor:
    """Rows past the longest length that a segment may have come back as zeros: a graph that froze too small a length is
    found."""
    out_THD = torch.zeros(q_THD.shape, dtype=q_THD.dtype)
    starts = starts_S1.tolist()
    for start, end in pairwise(starts):
        rows = slice(start, min(end, start + longest))
        if rows.start < rows.stop:
            visible = torch.ones(2 * (rows.stop - start,), dtype=torch.bool).tril() if causal else None
            out_THD[rows] = _attend(q_THD[rows], k_TGD[rows], v_TGD[rows], visible, scale)
    return out_THD


def _paged(  # noqa: PLR0913
    q_THD: Tensor,
    k_cache_NBGD: Tensor,
    v_cache_NBGD: Tensor,
    starts_R1: Tensor,
    lengths_R: Tensor,
    tables_RM: Tensor,
    max_query: int,
    max_keys: int,
    scale: float,
    window: int | None,
    limits_T: Tensor | None,
) -> Tensor:
    num_blocks, block_size = k_cache_NBGD.shape[:2]
    most_keys = min(max_keys, tables_RM.shape[1] * block_size)
    out_THD = torch.zeros(q_THD.shape, dtype=q_THD.dtype)
    starts = starts_R1.tolist()
    for request, length in enumerate(lengths_R.tolist()):
        start, end = starts[request : request + 2]
        rows, num_keys = slice(start, min(end, start + max_query)), min(length, most_keys)
        if rows.start >= rows.stop or num_keys == 0:
            continue
        positions_L = torch.arange(rows.stop - start) + (length - (end - start))
        limits_L = limits_T[rows] if limits_T is not None else None
        visible_LK = _visible(positions_L, num_keys, window, limits_L)
        blocks = tables_RM[request, : -(-num_keys // block_size)].clamp(0, num_blocks - 1)
        keys, values = (
            cache.index_select(0, blocks).flatten(0, 1)[:num_keys] for cache in (k_cache_NBGD, v_cache_NBGD)
        )
        found_LHD = _attend(q_THD[rows], keys, values, visible_LK, scale)
        out_THD[rows] = found_LHD.masked_fill(~visible_LK.any(-1)[:, None, None], 0.0)
    return out_THD


def _visible(positions_L: Tensor, num_keys: int, window: int | None, limits_L: Tensor | None) -> Tensor:
    keys_K = torch.arange(num_keys)
    end_L = positions_L + 1 if limits_L is None else torch.maximum(positions_L + 1, limits_L)
    visible_LK = keys_K < end_L[:, None]
    if window is not None:
        visible_LK &= keys_K > (positions_L - window)[:, None]
    return visible_LK


def _attend(q_LHD: Tensor, k_KGD: Tensor, v_KGD: Tensor, visible_LK: Tensor | None, scale: float) -> Tensor:
    """In float32; every head of a group reads the group's keys and values."""
    share = q_LHD.shape[1] // k_KGD.shape[1]
    q_HLD, k_HKD, v_HKD = (
        x.float().transpose(0, 1) for x in (q_LHD, k_KGD.repeat_interleave(share, 1), v_KGD.repeat_interleave(share, 1))
    )
    out_1HLD = functional.scaled_dot_product_attention(
        q_HLD[None], k_HKD[None], v_HKD[None], attn_mask=visible_LK, scale=scale
    )
    return out_1HLD[0].transpose(0, 1).to(q_LHD.dtype)


_LIBRARY.impl("varlen_attention", _varlen, "CPU")
_LIBRARY.impl("paged_attention", _paged, "CPU")

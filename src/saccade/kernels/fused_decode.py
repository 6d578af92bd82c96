"""Attention of decode steps on a GPU: where Triton attends, one kernel norms, turns, stores and attends."""

import torch
import triton
from torch import Tensor

from saccade.kernels import fused
from saccade.kernels.backends import AttentionDispatch, PagedCall
from saccade.kernels.fused_attention import TritonAttention, choose_splits, combine, paged_tile, precision_of
from saccade.kernels.overlap import overlapping
from saccade.kernels.triton_decode import decode_kernel

_LEAST_WIDTH, _WIDEST = 32, 128  # of a head, a power of two: a half is one side of a product


class DecodeAttention:
    """`reference.decode_attention`, for whatever kernels a dispatch chooses."""

    def __init__(self, dispatch: AttentionDispatch) -> None:
        self._dispatch = dispatch
        self.name = dispatch.name

    def decode_attention(  # noqa: PLR0913
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        cos_TD: Tensor,
        sin_TD: Tensor,
        slots_T: Tensor,
        k_cache_NBGD: Tensor,
        v_cache_NBGD: Tensor,
        query_start_R1: Tensor,
        key_lengths_R: Tensor,
        block_tables_RM: Tensor,
        *,
        max_keys: int,
        scale: float,
        window: int | None = None,
        offset: float = 0.0,
    ) -> Tensor:
        call = self._dispatch.paged_call(
            q_THD, k_cache_NBGD, key_lengths_R, max_query=1, max_keys=max_keys, window=window, has_limits=False
        )
        rotary = (q_weight, k_weight, eps, cos_TD, sin_TD, slots_T)
        caches, requests = (k_cache_NBGD, v_cache_NBGD), (key_lengths_R, block_tables_RM)
        if self._is_one_kernel(call, cos_TD.shape[-1]):
            return _decode(call, (q_THD, k_TGD, v_TGD), rotary, caches, requests, scale, offset)
        q_THD = fused.qk_norm_rotary_store(q_THD, k_TGD, v_TGD, *rotary, *caches, offset=offset)
        return self._dispatch.paged_attention(
            q_THD, *caches, query_start_R1, *requests, max_query=1, max_keys=max_keys, scale=scale, window=window
        )

    def _is_one_kernel(self, call: PagedCall, rotary_width: int) -> bool:
        width = call.head_width
        is_simple = width == rotary_width == triton.next_power_of_2(width) and _LEAST_WIDTH <= width <= _WIDEST
        return call.num_rows > 0 and is_simple and isinstance(self._dispatch.backend_for(call), TritonAttention)


def _decode(
    call: PagedCall,
    heads: tuple[Tensor, Tensor, Tensor],
    rotary: tuple[Tensor | None, Tensor | None, float, Tensor, Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    requests: tuple[Tensor, Tensor],
    scale: float,
    offset: float,
) -> Tensor:
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in heads)
    q_weight, k_weight, eps, cos, sin, slots = rotary
    share = call.num_heads // call.num_groups
    block_m, block_n = paged_tile(share, call.head_width, call.dtype)
    reach = call.max_keys if call.window is None else min(call.max_keys, call.window + 1)
    splits = choose_splits(call.num_groups * call.num_requests, reach)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    partial = lse = out  # pointers, not read
    if splits > 1:
        partial = torch.empty((splits, *q.shape), dtype=torch.float32, device=q.device)
        lse = partial.new_empty(partial.shape[:-1])
    decode_kernel[(splits, call.num_groups, call.num_requests)](
        q,
        k,
        v,
        q if q_weight is None else q_weight,
        k if k_weight is None else k_weight,
        cos,
        sin,
        slots,
        *caches,
        out,
        *requests,
        partial,
        lse,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        cos.stride(0),
        sin.stride(0),
        *caches[0].stride()[:3],
        *caches[1].stride()[:3],
        requests[1].stride(0),
        requests[1].shape[1],
        *q.shape[:2],
        eps,
        offset,
        scale,
        D=call.head_width,
        SHARE=share,
        SPLITS=splits,
        BLOCK_SIZE=call.block_size,
        WINDOW=call.window or 0,
        Q_NORM=q_weight is not None,
        K_NORM=k_weight is not None,
        PRECISION=precision_of(call.dtype),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=4,
        num_stages=2,
        **overlapping(q, is_early=True),
    )
    if splits > 1:
        combine(partial, lse, out, splits)
    return out

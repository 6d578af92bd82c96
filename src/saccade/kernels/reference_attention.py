"""Plain-torch attention over packed segments and over a paged key/value cache, in loops over segments and requests.

T rows, S segments, R requests, H query heads, G key/value heads, D head width, N blocks, B slots in a block, M entries
of a block table; L query rows and K keys of one segment or request.

Each function is one torch operation, so a recording has a single node, which reads boundaries, lengths and tables when
it runs. It does no work for padding and frees its temporaries on return. Segments and requests never mix, not even with
weight zero: 0 * NaN is NaN.
"""

from collections.abc import Callable
from functools import wraps
from itertools import pairwise
from typing import ParamSpec

import torch
from torch import Tensor
from torch.library import infer_schema
from torch.nn import functional

P = ParamSpec("P")
_LIBRARY = torch.library.Library("saccade", "DEF")


def _as_one_operation(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    name = function.__name__
    _LIBRARY.define(name + infer_schema(function, mutates_args=()))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    operation = getattr(torch.ops.saccade, name)

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> Tensor:
        result: Tensor = operation(*args, **options)
        return result

    return call


@_as_one_operation
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
    """Attention inside each segment `cu_seqlens[s]:cu_seqlens[s + 1]` of the packed rows.

    `cu_seqlens[-1]` is T: padded rows form their own segment. A segment may be empty and has at most `max_seqlen` rows.
    Any rows past that are zero in the result, which exposes a graph that froze too small a length.
    """
    out_THD = q_THD.new_zeros(q_THD.shape)
    for start, end in pairwise(cu_seqlens_S1.tolist()):
        rows = slice(start, min(end, start + max_seqlen))
        if rows.start < rows.stop:
            shape_LL = 2 * (rows.stop - start,)
            visible_LL = torch.ones(shape_LL, dtype=torch.bool, device=q_THD.device).tril() if causal else None
            out_THD[rows] = _attend(q_THD[rows], k_TGD[rows], v_TGD[rows], visible_LL, scale)
    return out_THD


@_as_one_operation
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
    """Causal attention of new rows over cached keys.

    Request r owns rows `query_start[r]:query_start[r + 1]` and the first `key_lengths[r]` slots of its blocks; its last
    row is at position `key_lengths[r] - 1`. A row at position p sees the keys j with

        j < max(p + 1, limit)    and    j > p - window    and    j < key_lengths[r]

    where `limit` is the row's entry of `limits_T` (0 if there is none). This is Gemma-3's mask in transformers: global
    layers use OR(causal, same image), sliding layers AND(sliding window, OR(causal, same image)), and the sliding
    window (kv > q - window) bounds the past only. Rows of an image have `limit` = the position after its last token;
    the whole image must be in the cache when its rows are computed.

    Rows that see no key (a dummy request of length 0, rows past `query_start[-1]`) are zero in the result.
    """
    num_blocks, block_size = k_cache_NBGD.shape[:2]
    most_keys = min(max_keys, block_tables_RM.shape[1] * block_size)
    out_THD = q_THD.new_zeros(q_THD.shape)
    bounds = pairwise(query_start_R1.tolist())
    for request, ((start, end), length) in enumerate(zip(bounds, key_lengths_R.tolist(), strict=True)):
        rows, num_keys = slice(start, min(end, start + max_query)), min(length, most_keys)
        if rows.start >= rows.stop or num_keys == 0:
            continue
        blocks = block_tables_RM[request, : -(-num_keys // block_size)].clamp(0, num_blocks - 1)
        k_KGD, v_KGD = (
            cache.index_select(0, blocks).flatten(0, 1)[:num_keys] for cache in (k_cache_NBGD, v_cache_NBGD)
        )
        if end - start == 1 and window is None:  # the newest row sees all keys
            out_THD[rows] = _attend(q_THD[rows], k_KGD, v_KGD, None, scale)
            continue
        positions_L = torch.arange(rows.stop - start, device=q_THD.device) + (length - (end - start))
        end_L = positions_L + 1 if limits_T is None else torch.maximum(positions_L + 1, limits_T[rows])
        keys_K = torch.arange(num_keys, device=q_THD.device)
        visible_LK = keys_K < end_L[:, None]
        if window is not None:
            visible_LK &= keys_K > (positions_L - window)[:, None]
        found_LHD = _attend(q_THD[rows], k_KGD, v_KGD, visible_LK, scale)
        out_THD[rows] = found_LHD.masked_fill(~visible_LK.any(-1)[:, None, None], 0.0)
    return out_THD


def _attend(q_LHD: Tensor, k_KGD: Tensor, v_KGD: Tensor, visible_LK: Tensor | None, scale: float) -> Tensor:
    """Computes in float32."""
    share = q_LHD.shape[1] // k_KGD.shape[1]
    q_HLD, k_HKD, v_HKD = (
        x.float().transpose(0, 1) for x in (q_LHD, k_KGD.repeat_interleave(share, 1), v_KGD.repeat_interleave(share, 1))
    )
    out_1HLD = functional.scaled_dot_product_attention(
        q_HLD[None], k_HKD[None], v_HKD[None], attn_mask=visible_LK, scale=scale
    )
    return out_1HLD[0].transpose(0, 1).to(q_LHD.dtype)

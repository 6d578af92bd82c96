"""Plain-torch attention over packed segments and over a paged key/value cache.

T rows, S segments, R requests, L query rows a segment or request may have, K keys it may have, H query heads,
G key/value heads, D head width, N blocks, B slots in a block, M entries of a block table.

Boundaries, lengths and tables are read as tensors only, and every shape is a function of capacities. Rows are
gathered into one slab per segment or request, and what lies outside it is set to zero (never
multiplied by it: 0 * NaN is NaN), so whatever padded rows and unused slots hold stays where it is.
"""

import torch
from torch import Tensor
from torch.nn import functional


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

    `cu_seqlens[-1]` is T (padded rows are a segment of their own); a segment may be empty and has at most
    `max_seqlen` rows.
    """
    num_rows, num_segments = q_THD.shape[0], cu_seqlens_S1.shape[0] - 1
    width = min(max_seqlen, num_rows)
    if num_segments * width * width <= num_rows * num_rows:
        return _slab_attention(q_THD, k_TGD, v_TGD, cu_seqlens_S1, width, scale, causal)
    return _masked_attention(q_THD, k_TGD, v_TGD, cu_seqlens_S1, scale, causal)


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

    Request r owns rows `query_start[r]:query_start[r + 1]` and the first `key_lengths[r]` slots of its
    blocks; its last row is at position `key_lengths[r] - 1`. A row at position p sees the keys j with

        j < max(p + 1, limit)    and    j > p - window    and    j < key_lengths[r]

    where `limit` is the row's entry of `limits_T` (0 where there is none). This is the mask of Gemma-3 in
    transformers: global layers use OR(causal, same image), sliding layers AND(sliding window, OR(causal, same
    image)), and the sliding window (kv > q - window) bounds the past only. An image's rows have `limit` = the
    position after its last token; the whole image must be in the cache when its rows are computed.

    Rows that see no key (a dummy request of length 0, rows past `query_start[-1]`) come back as zeros.
    """
    num_rows, num_requests = q_THD.shape[0], key_lengths_R.shape[0]
    device = q_THD.device
    rows_RL, inside_RL = _rows_of(query_start_R1, min(max_query, num_rows), num_rows)
    num_queries_R = query_start_R1[1:] - query_start_R1[:-1]
    num_keys = min(max_keys, block_tables_RM.shape[1] * k_cache_NBGD.shape[1])
    keys_K = torch.arange(num_keys, device=device)
    cached_RK = keys_K < key_lengths_R[:, None]

    positions_RL = (key_lengths_R - num_queries_R - query_start_R1[:-1])[:, None] + rows_RL
    end_RL = positions_RL + 1
    if limits_T is not None:
        end_RL = torch.maximum(end_RL, _take(limits_T, rows_RL))
    visible_RLK = cached_RK[:, None, :] & (keys_K < end_RL[:, :, None])
    if window is not None:
        visible_RLK &= keys_K > (positions_RL - window)[:, :, None]

    k_RKGD = _gather_cached(k_cache_NBGD, block_tables_RM, cached_RK)
    v_RKGD = _gather_cached(v_cache_NBGD, block_tables_RM, cached_RK)
    out_RLHD = _attend(_take(q_THD, rows_RL), k_RKGD, v_RKGD, visible_RLK, scale)
    has_key_RL = inside_RL & visible_RLK.any(-1)
    request_T = _segment_of_rows(query_start_R1, num_rows, num_requests)
    return _scatter_back(out_RLHD, has_key_RL, request_T, query_start_R1)


def cache_shape(num_blocks: int, block_size: int, num_groups: int, head_width: int) -> tuple[int, ...]:
    """Of the keys of one layer, and of its values."""
    return num_blocks, block_size, num_groups, head_width


def _slab_attention(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, cu_seqlens_S1: Tensor, width: int, scale: float, causal: bool
) -> Tensor:
    num_rows, num_segments = q_THD.shape[0], cu_seqlens_S1.shape[0] - 1
    rows_SL, inside_SL = _rows_of(cu_seqlens_S1, width, num_rows)
    visible_SLL = inside_SL[:, None, :].expand(-1, width, -1)
    if causal:
        visible_SLL = visible_SLL & torch.ones(width, width, dtype=torch.bool, device=q_THD.device).tril()
    outside = ~inside_SL[:, :, None, None]
    k_SLGD = _take(k_TGD, rows_SL).masked_fill(outside, 0.0)
    v_SLGD = _take(v_TGD, rows_SL).masked_fill(outside, 0.0)
    out_SLHD = _attend(_take(q_THD, rows_SL), k_SLGD, v_SLGD, visible_SLL, scale)
    segment_T = _segment_of_rows(cu_seqlens_S1, num_rows, num_segments)
    return _scatter_back(out_SLHD, inside_SL, segment_T, cu_seqlens_S1)


def _masked_attention(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, cu_seqlens_S1: Tensor, scale: float, causal: bool
) -> Tensor:
    """One T x T mask: the cheaper way when few segments share a large `max_seqlen`.

    Here all segments meet in one product, so values that are not finite are taken out before it, and the rows
    of the segment they belong to are set to NaN after it.
    """
    num_rows = q_THD.shape[0]
    segment_T = _segment_of_rows(cu_seqlens_S1, num_rows, cu_seqlens_S1.shape[0] - 1)
    visible_TT = segment_T[:, None] == segment_T[None, :]
    if causal:
        visible_TT = visible_TT.tril()
    finite_TG1 = torch.isfinite(k_TGD).all(-1, keepdim=True) & torch.isfinite(v_TGD).all(-1, keepdim=True)
    k_1TGD, v_1TGD = (x.masked_fill(~finite_TG1, 0.0).unsqueeze(0) for x in (k_TGD, v_TGD))
    out_THD = _attend(q_THD.unsqueeze(0), k_1TGD, v_1TGD, visible_TT.unsqueeze(0), scale)[0]
    spoilt_T = (visible_TT & ~finite_TG1.all(1).squeeze(-1)).any(-1)
    return out_THD.masked_fill(spoilt_T[:, None, None], float("nan"))


def _attend(q_SLHD: Tensor, k_SKGD: Tensor, v_SKGD: Tensor, visible_SLK: Tensor, scale: float) -> Tensor:
    """Grouped heads are folded into query rows, so keys and values are never repeated."""
    num_slabs, num_queries, num_heads, head_width = q_SLHD.shape
    num_groups = k_SKGD.shape[2]
    share = num_heads // num_groups
    q_SGLD = q_SLHD.float().reshape(num_slabs, num_queries, num_groups, share, head_width)
    q_SGLD = q_SGLD.permute(0, 2, 3, 1, 4).flatten(2, 3)
    k_SGKD, v_SGKD = k_SKGD.float().transpose(1, 2), v_SKGD.float().transpose(1, 2)
    visible = visible_SLK[:, None, None].expand(-1, 1, share, -1, -1).flatten(2, 3)
    out_SGLD = functional.scaled_dot_product_attention(q_SGLD, k_SGKD, v_SGKD, attn_mask=visible, scale=scale)
    out = out_SGLD.reshape(num_slabs, num_groups, share, num_queries, head_width).permute(0, 3, 1, 2, 4)
    return out.reshape(num_slabs, num_queries, num_heads, head_width).to(q_SLHD.dtype)


def _rows_of(starts_S1: Tensor, width: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """The packed rows of each segment as an (S, width) index with in-range fillers, and which are real."""
    rows_SL = starts_S1[:-1, None] + torch.arange(width, device=starts_S1.device)
    return rows_SL.clamp(max=num_rows - 1), rows_SL < starts_S1[1:, None]


def _segment_of_rows(starts_S1: Tensor, num_rows: int, num_segments: int) -> Tensor:
    """The segment that owns each packed row; rows past the last boundary count to the last segment."""
    rows_T = torch.arange(num_rows, device=starts_S1.device, dtype=starts_S1.dtype)
    segment_T = torch.searchsorted(starts_S1[1:].contiguous(), rows_T, right=True)
    return segment_T.clamp(max=num_segments - 1)


def _gather_cached(cache_NBGD: Tensor, block_tables_RM: Tensor, cached_RK: Tensor) -> Tensor:
    """The slots of each request in order; past its length all are zero, whatever cache and table hold."""
    blocks_RM = block_tables_RM.clamp(0, cache_NBGD.shape[0] - 1)
    slots_RKGD = _take(cache_NBGD, blocks_RM).flatten(1, 2)[:, : cached_RK.shape[1]]
    return slots_RKGD.masked_fill(~cached_RK[:, :, None, None], 0.0)


def _scatter_back(out_SLHD: Tensor, valid_SL: Tensor, segment_T: Tensor, starts_S1: Tensor) -> Tensor:
    """Packed rows out of slabs; rows no slab holds are zero."""
    width = out_SLHD.shape[1]
    rows_T = torch.arange(segment_T.shape[0], device=segment_T.device)
    place_T = rows_T - _take(starts_S1, segment_T)
    index_T = segment_T * width + place_T.clamp(0, width - 1)
    valid_T = _take(valid_SL.flatten(), index_T) & (place_T < width)
    return _take(out_SLHD.flatten(0, 1), index_T).masked_fill(~valid_T[:, None, None], 0.0)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """`x[index]` along the first dimension, without the operation that also takes masks and so may resize."""
    return x.index_select(0, index.flatten()).reshape(index.shape + x.shape[1:])

"""Adapters from the signatures of `saccade.kernels.reference` to the attention packages of others.

Both packages read boundaries from device memory, so a captured call stays right when they are refilled.
"""

import importlib
import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from saccade.kernels import attention


@dataclass(frozen=True, slots=True)
class FlashAttention:
    """flash-attn-4: packed and paged attention in half precision on Hopper and later.

    On Hopper it takes heads of 8 to 256 columns in multiples of 8. It has no per-row limit, and it never
    splits one request's keys over several programs, so those two cases go to Triton.

    Its tiles reach past the end of a segment or request; what lies there gets weight zero, and 0 * NaN is NaN. So
    values must be finite everywhere: packed ones by their caller, paged ones because nothing else is ever stored.
    """

    function: Callable[..., Any]

    def varlen_attention(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        cu_seqlens_S1: Tensor,
        max_seqlen: int,
        *,
        scale: float,
        causal: bool = False,
    ) -> Tensor:
        """See `reference.varlen_attention`; windows of at most 64 rows take the Triton kernel."""
        if max_seqlen <= attention.SHORT_SEGMENT:
            return attention.varlen_attention(
                q_THD, k_TGD, v_TGD, cu_seqlens_S1, max_seqlen, scale=scale, causal=causal
            )
        return _first(
            self.function(
                q_THD,
                k_TGD,
                v_TGD,
                cu_seqlens_q=cu_seqlens_S1,
                cu_seqlens_k=cu_seqlens_S1,
                max_seqlen_q=max_seqlen,
                max_seqlen_k=max_seqlen,
                softmax_scale=scale,
                causal=causal,
            )
        )

    def paged_attention(  # noqa: PLR0913
        self,
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
        """See `reference.paged_attention`."""
        if limits_T is not None or _wants_splits(key_lengths_R, k_cache_NBGD, max_query, max_keys, window):
            return attention.paged_attention(
                q_THD,
                k_cache_NBGD,
                v_cache_NBGD,
                query_start_R1,
                key_lengths_R,
                block_tables_RM,
                max_query=max_query,
                max_keys=max_keys,
                scale=scale,
                window=window,
                limits_T=limits_T,
            )
        return _first(
            self.function(
                q_THD,
                k_cache_NBGD,
                v_cache_NBGD,
                cu_seqlens_q=query_start_R1,
                max_seqlen_q=max_query,
                max_seqlen_k=max_keys,
                seqused_k=key_lengths_R,
                page_table=block_tables_RM,
                softmax_scale=scale,
                causal=True,
                window_size=(None, None) if window is None else (window - 1, 0),
            )
        )


@dataclass(frozen=True, slots=True)
class TorchVarlen:
    """`torch.nn.attention.varlen`: packed attention in half precision on Ampere and later.

    Its keywords changed between releases: causality is `is_causal` in 2.10 and a window from 2.11 on, `scale`
    and `enable_gqa` came later. `accepts` has the names the installed release takes.
    """

    function: Callable[..., Any]
    accepts: frozenset[str]

    def varlen_attention(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        cu_seqlens_S1: Tensor,
        max_seqlen: int,
        *,
        scale: float,
        causal: bool = False,
    ) -> Tensor:
        """See `reference.varlen_attention`; windows of at most 64 rows take the Triton kernel."""
        if max_seqlen <= attention.SHORT_SEGMENT:
            return attention.varlen_attention(
                q_THD, k_TGD, v_TGD, cu_seqlens_S1, max_seqlen, scale=scale, causal=causal
            )
        share = q_THD.shape[1] // k_TGD.shape[1]
        options: dict[str, Any] = {}
        if "scale" in self.accepts:
            options["scale"] = scale
        else:
            q_THD = q_THD * (scale * math.sqrt(q_THD.shape[-1]))
        if causal:
            options |= {"window_size": (-1, 0)} if "window_size" in self.accepts else {"is_causal": True}
        if share > 1 and "enable_gqa" in self.accepts:
            options["enable_gqa"] = True
        elif share > 1:
            k_TGD, v_TGD = (x.repeat_interleave(share, dim=1) for x in (k_TGD, v_TGD))
        return _first(
            self.function(q_THD, k_TGD, v_TGD, cu_seqlens_S1, cu_seqlens_S1, max_seqlen, max_seqlen, **options)
        )


def load_flash_attention() -> FlashAttention | str:
    """The adapter, or why there is none."""
    # Its compiler warns of an argument that flash-attn-4 leaves out, in lines of a thousand characters.
    warnings.filterwarnings("ignore", message="Argument aux_data", category=UserWarning)
    try:
        interface = importlib.import_module("flash_attn.cute.interface")
        return FlashAttention(interface.flash_attn_varlen_func)
    except (ImportError, AttributeError, OSError) as error:
        return f"flash-attn-4 cannot be imported ({error}); install saccade[cuda]"


def load_torch_varlen() -> TorchVarlen | str:
    """The adapter, or why there is none."""
    try:
        function = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError) as error:
        return f"torch.nn.attention.varlen cannot be imported ({error})"
    return TorchVarlen(function, frozenset(inspect.signature(function).parameters))


def _wants_splits(
    key_lengths_R: Tensor, k_cache_NBGD: Tensor, max_query: int, max_keys: int, window: int | None
) -> bool:
    """A decode step of few requests over long contexts: one program per key head would leave the GPU idle."""
    reach = max_keys if window is None else min(max_keys, window)
    num_programs = key_lengths_R.shape[0] * k_cache_NBGD.shape[2]
    return max_query == 1 and attention.choose_splits(num_programs, reach) >= 4


def _first(result: Any) -> Tensor:
    """Both packages have returned a tensor in one release and (tensor, log-sum-exp, ...) in another."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out

"""Attention from third-party packages. Both read boundaries from device memory, so captured calls can replay."""

import importlib
import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade.kernels.backends import AttendPacked, AttendPaged, PackedCall, PagedCall
from saccade.kernels.fused_attention import SHORT_SEGMENT, choose_splits

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class FlashAttention:
    """flash-attn-4: packed and paged attention in half precision on Hopper and later.

    The head width must be a multiple of 8, up to 256. Calls with per-row limits, segments that fit one tile, and decode
    steps that must split a request's keys over several programs go to other backends.

    Tiles read past the end of a segment or request with weight zero. 0 * NaN is NaN, so those values must be finite:
    the caller ensures it for packed values, and pages only ever store finite ones.
    """

    function: Callable[..., Any]
    name = "flash-attn-4"

    def packed(self, call: PackedCall) -> AttendPacked | None:
        if call.max_seqlen <= SHORT_SEGMENT or not _fits(call):
            return None
        options = {"max_seqlen_q": call.max_seqlen, "max_seqlen_k": call.max_seqlen, "causal": call.causal}

        def attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float) -> Tensor:
            bounds = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
            return _first(self.function(q, k, v, **bounds, softmax_scale=scale, **options))

        return attend

    def paged(self, call: PagedCall) -> AttendPaged | None:
        """None for a decode step of few requests over long contexts: one program per key head leaves the GPU idle."""
        reach = call.max_keys if call.window is None else min(call.max_keys, call.window)
        splits = choose_splits(call.num_requests * call.num_groups, reach) if call.max_query == 1 else 1
        if call.has_limits or splits >= 4 or not _fits(call):
            return None
        window = (None, None) if call.window is None else (call.window - 1, 0)
        bounds = {"max_seqlen_q": call.max_query, "max_seqlen_k": call.max_keys, "causal": True, "window_size": window}

        def attend(
            q: Tensor,
            caches: tuple[Tensor, Tensor],
            requests: tuple[Tensor, Tensor, Tensor],
            limits: Tensor | None,
            scale: float,
        ) -> Tensor:
            starts, lengths, tables = requests
            where = {"cu_seqlens_q": starts, "seqused_k": lengths, "page_table": tables}
            return _first(self.function(q, *caches, **where, softmax_scale=scale, **bounds))

        return attend


@dataclass(frozen=True, slots=True)
class TorchVarlen:
    """`torch.nn.attention.varlen`: packed attention in half precision on Ampere and later.

    `accepts` lists the keywords of the installed release: torch 2.10 spells causality `is_causal`, 2.11 and later spell
    it as a window; `scale` and `enable_gqa` came later."""

    function: Callable[..., Any]
    accepts: frozenset[str]
    name = "torch varlen"

    def packed(self, call: PackedCall) -> AttendPacked | None:
        if call.max_seqlen <= SHORT_SEGMENT:
            return None
        options: dict[str, Any] = {"max_q": call.max_seqlen, "max_k": call.max_seqlen}
        if call.causal:
            options |= {"window_size": (-1, 0)} if "window_size" in self.accepts else {"is_causal": True}
        share = call.num_heads // call.num_groups
        if share > 1 and "enable_gqa" in self.accepts:
            options["enable_gqa"], share = True, 1

        def attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float) -> Tensor:
            if share > 1:
                k, v = (x.repeat_interleave(share, dim=1) for x in (k, v))
            if "scale" in self.accepts:
                return _first(self.function(q, k, v, starts, starts, scale=scale, **options))
            return _first(self.function(q * (scale * math.sqrt(q.shape[-1])), k, v, starts, starts, **options))

        return attend

    def paged(self, call: PagedCall) -> None:
        """Not supported."""


def _fits(call: PackedCall | PagedCall) -> bool:
    return call.head_width % 8 == 0 and call.head_width <= 256


def flash_refusal(capability: tuple[int, int], dtype: torch.dtype) -> str:
    """Why flash-attn-4 cannot be used; empty if it can."""
    if capability < (9, 0):
        return (
            f"flash-attn-4's paged attention needs compute capability 9.0; this GPU has {capability[0]}.{capability[1]}"
        )
    return "" if dtype in HALF else f"flash-attn-4 takes float16 and bfloat16, not {dtype}"


def varlen_refusal(capability: tuple[int, int], dtype: torch.dtype) -> str:
    """Why torch's varlen cannot be used; empty if it can."""
    if capability < (8, 0):
        return f"torch varlen needs compute capability 8.0; this GPU has {capability[0]}.{capability[1]}"
    return "" if dtype in HALF else f"torch varlen takes float16 and bfloat16, not {dtype}"


def load_flash_attention() -> FlashAttention | str:
    """Returns the adapter, or the reason it cannot be loaded."""
    # Its compiler prints thousand-character warnings about an argument that flash-attn-4 omits.
    warnings.filterwarnings("ignore", message="Argument aux_data", category=UserWarning)
    try:
        interface = importlib.import_module("flash_attn.cute.interface")
        return FlashAttention(interface.flash_attn_varlen_func)
    except (ImportError, AttributeError, OSError) as error:
        return f"flash-attn-4 cannot be imported ({error}); install saccade-vlm[cuda]"


def load_torch_varlen() -> TorchVarlen | str:
    try:
        function = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError) as error:
        return f"torch.nn.attention.varlen cannot be imported ({error})"
    return TorchVarlen(function, frozenset(inspect.signature(function).parameters))


def _first(result: Any) -> Tensor:
    """Depending on the release, both packages return a tensor or (tensor, log-sum-exp, ...)."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out

"""The interface of attention backends, and the choice of a backend for each call.

The choice and the launch plan depend only on shapes and capacities, so a graph and an eager pass of the same shape
launch the same kernels. Boundaries, lengths and tables are read on the device.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class PackedCall(NamedTuple):
    """What the host knows about a call over packed segments."""

    num_rows: int
    num_heads: int
    num_groups: int
    head_width: int
    dtype: torch.dtype
    num_segments: int
    max_seqlen: int
    causal: bool


class PagedCall(NamedTuple):
    """What the host knows about a call over a paged cache."""

    num_rows: int
    num_heads: int
    num_groups: int
    head_width: int
    dtype: torch.dtype
    num_requests: int
    block_size: int
    max_query: int
    max_keys: int
    window: int | None
    has_limits: bool


# (queries, keys, values, segment starts, scale)
AttendPacked = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
# (queries, (key cache, value cache), (query starts, key lengths, block tables), limits, scale)
AttendPaged = Callable[[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor], Tensor | None, float], Tensor]


class AttentionBackend(Protocol):
    """Attention as defined by `reference_attention`. Each method plans one kind of call, once. It returns None if the
    backend does not support the call or a later backend is faster."""

    @property
    def name(self) -> str: ...

    def packed(self, call: PackedCall) -> AttendPacked | None: ...

    def paged(self, call: PagedCall) -> AttendPaged | None: ...


class AttentionDispatch:
    """The backends of a GPU, best first. Each call goes to the first one that takes it."""

    def __init__(self, *backends: AttentionBackend) -> None:
        self.backends = backends
        self.name = " or ".join(backend.name for backend in backends)
        self._chosen = lru_cache(maxsize=4096)(self._choose)

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
        num_rows, num_heads, head_width = q_THD.shape
        num_segments = cu_seqlens_S1.shape[0] - 1
        shape = (num_rows, num_heads, k_TGD.shape[1], head_width, q_THD.dtype)
        if num_rows == 0:
            return q_THD.new_empty(q_THD.shape)
        _, attend = self._chosen(PackedCall(*shape, num_segments, max_seqlen, causal))
        return attend(q_THD, k_TGD, v_TGD, cu_seqlens_S1, scale)

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
        num_rows, num_heads, head_width = q_THD.shape
        _, block_size, num_groups, _ = k_cache_NBGD.shape
        shape = (num_rows, num_heads, num_groups, head_width, q_THD.dtype, key_lengths_R.shape[0], block_size)
        if num_rows == 0:
            return q_THD.new_empty(q_THD.shape)
        _, attend = self._chosen(PagedCall(*shape, max_query, max_keys, window, limits_T is not None))
        caches = (k_cache_NBGD, v_cache_NBGD)
        requests = (query_start_R1, key_lengths_R, block_tables_RM)
        return attend(q_THD, caches, requests, limits_T, scale)

    def _choose(self, call: PackedCall | PagedCall) -> tuple[AttentionBackend, Callable[..., Tensor]]:
        for backend in self.backends:
            attend = backend.packed(call) if isinstance(call, PackedCall) else backend.paged(call)
            if attend is not None:
                return backend, attend
        raise AssertionError(f"none of {self.name} supports {call}")

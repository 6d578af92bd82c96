"""What an implementation of attention has to offer, and which one takes a call.

The choice and the plan of a launch follow from shapes and capacities alone, so a graph and an eager pass of the same
shapes launch the same kernels. Boundaries, lengths and tables are read on the device.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class PackedCall(NamedTuple):
    """What the host knows of a call over packed segments."""

    num_rows: int
    num_heads: int
    num_groups: int
    head_width: int
    dtype: torch.dtype
    num_segments: int
    max_seqlen: int
    causal: bool


class PagedCall(NamedTuple):
    """What the host knows of a call over a paged cache."""

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


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """How a backend launches a call: keyword arguments of its kernel, and the shapes of the float32 buffers it needs
    besides its output."""

    options: Mapping[str, Any] = field(default_factory=dict)
    grid: tuple[int, ...] = ()
    buffers: tuple[tuple[int, ...], ...] = ()


class AttentionBackend(Protocol):
    """Attention with the meaning of `reference_attention`."""

    @property
    def name(self) -> str: ...

    def plan_packed(self, call: PackedCall) -> LaunchPlan | None:
        """None where such a call is not supported, or another backend does it better."""

    def plan_paged(self, call: PagedCall) -> LaunchPlan | None:
        """As `plan_packed`."""

    def attend_packed(
        self, plan: LaunchPlan, buffers: list[Tensor], q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float
    ) -> Tensor: ...

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
        """`requests` are the starts of their queries, their numbers of keys, and their block tables."""

    def cache_shape(self, num_blocks: int, block_size: int, num_groups: int, head_width: int) -> tuple[int, ...]:
        """Of the keys of one layer, and of its values. All backends of a device must agree on it."""


class AttentionDispatch:
    """The backends of a device, best first. Every call goes to the first one that has a plan for it."""

    def __init__(self, *backends: AttentionBackend) -> None:
        self.backends = backends
        self.name = " or ".join(backend.name for backend in backends)
        self._plan = lru_cache(maxsize=4096)(self._first_plan)

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
        """See `reference.varlen_attention`."""
        num_rows, num_heads, head_width = q_THD.shape
        num_segments = cu_seqlens_S1.shape[0] - 1
        shape = (num_rows, num_heads, k_TGD.shape[1], head_width, q_THD.dtype)
        backend, plan = self._plan(PackedCall(*shape, num_segments, max_seqlen, causal))
        if num_rows == 0:
            return q_THD.new_empty(q_THD.shape)
        return backend.attend_packed(plan, _buffers(plan, q_THD), q_THD, k_TGD, v_TGD, cu_seqlens_S1, scale)

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
        num_rows, num_heads, head_width = q_THD.shape
        _, block_size, num_groups, _ = k_cache_NBGD.shape
        shape = (num_rows, num_heads, num_groups, head_width, q_THD.dtype, key_lengths_R.shape[0], block_size)
        backend, plan = self._plan(PagedCall(*shape, max_query, max_keys, window, limits_T is not None))
        if num_rows == 0:
            return q_THD.new_empty(q_THD.shape)
        caches = (k_cache_NBGD, v_cache_NBGD)
        requests = (query_start_R1, key_lengths_R, block_tables_RM)
        return backend.attend_paged(plan, _buffers(plan, q_THD), q_THD, caches, requests, limits_T, scale)

    def cache_shape(self, num_blocks: int, block_size: int, num_groups: int, head_width: int) -> tuple[int, ...]:
        """See `reference.cache_shape`."""
        shapes = {b.name: b.cache_shape(num_blocks, block_size, num_groups, head_width) for b in self.backends}
        assert len(set(shapes.values())) == 1, f"backends of one device disagree about the cache: {shapes}"
        return shapes.popitem()[1]

    def _first_plan(self, call: PackedCall | PagedCall) -> tuple[AttentionBackend, LaunchPlan]:
        for backend in self.backends:
            plan = backend.plan_packed(call) if isinstance(call, PackedCall) else backend.plan_paged(call)
            if plan is not None:
                return backend, plan
        raise AssertionError(f"none of {self.name} supports {call}")


def _buffers(plan: LaunchPlan, q_THD: Tensor) -> list[Tensor]:
    return [torch.empty(shape, dtype=torch.float32, device=q_THD.device) for shape in plan.buffers]

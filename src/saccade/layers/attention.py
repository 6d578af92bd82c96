"""Causal attention over a paged key/value cache. T rows, R requests, M blocks of a table, N blocks of B slots, H query
heads and G key/value heads of this rank, K columns of a head, D width."""

from torch import Tensor

from saccade.kernels.weight import Inputs
from saccade.layers.layer import Layer, Placement
from saccade.layers.layer_spec import AttentionSpec
from saccade.layers.linear import QKVLinear, RowLinear
from saccade.layers.norm import RMSNorm
from saccade.layers.step import Cache, Step


class Attention(Layer):
    def __init__(self, place: Placement, width: int, spec: AttentionSpec, window: int | None) -> None:
        self.kernels = place.kernels
        self.spec = spec
        self.window = window
        self.qkv = QKVLinear(
            place.inside("qkv"),
            width,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            bias=spec.qkv_bias,
        )
        self.out = RowLinear(place.inside("out"), spec.num_heads * spec.head_dim, width, bias=spec.out_bias)
        self.q_norm = RMSNorm(place, spec.head_dim, spec.norm) if spec.norm else None
        self.k_norm = RMSNorm(place, spec.head_dim, spec.norm) if spec.norm else None

    def __call__(self, x_TD: Inputs, cos_TK: Tensor, sin_TK: Tensor, step: Step, cache: Cache) -> Tensor:
        q_THK, k_TGK, v_TGK = self.qkv.heads(x_TD)
        norm = self.spec.norm
        q_THK = self.kernels.qk_norm_rotary_store(
            q_THK,
            k_TGK,
            v_TGK,
            self.q_norm.weight if self.q_norm else None,
            self.k_norm.weight if self.k_norm else None,
            norm.eps if norm else 0.0,
            cos_TK,
            sin_TK,
            step.slots_T,
            *cache,
            offset=norm.offset if norm else 0.0,
        )
        static = (*cache, step.query_start_R1, step.key_lengths_R, step.block_tables_RM)
        bounds = (step.limits_T, step.max_query, step.max_keys)
        o_THK = step.outside(self._attend, *bounds, *static, out="attn", q=q_THK)
        return self.out(o_THK.reshape(q_THK.shape[0], self.qkv.num_heads * self.qkv.head_dim))

    def _attend(self, limits_T: Tensor | None, max_query: int, max_keys: int, *static: Tensor, q: Tensor) -> Tensor:
        """Takes tensors as separate arguments, not as a step, so that a capture can check that they are static."""
        return self.kernels.paged_attention(
            q.view(-1, self.qkv.num_heads, self.qkv.head_dim),
            *static,
            max_query=max_query,
            max_keys=max_keys,
            scale=self.spec.scale,
            window=self.window,
            limits_T=limits_T,
        )

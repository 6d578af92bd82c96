"""Model specifications. A family builds them from a config.json; the decoder and the tower read nothing else."""

from dataclasses import dataclass

from saccade.layers.layer_spec import (
    AttentionSpec,
    MergerSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
    PoolSpec,
    RotarySpec,
    VisionBlockSpec,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """What may differ between decoder layers. `rotary` is an index into the decoder's rotaries."""

    mlp: MLPSpec | MoESpec
    window: int | None = None
    rotary: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A causal decoder. `post_norms` adds a norm after attention and MLP, before the residual addition."""

    vocab_size: int
    width: int
    attention: AttentionSpec
    norm: NormSpec
    rotaries: tuple[RotarySpec, ...]
    layers: tuple[LayerSpec, ...]
    tied_head: bool
    post_norms: bool = False
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    deepstack_levels: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """A vision tower: patches of `channels` x `temporal_patch` x `patch` x `patch` to rows of the decoder's width.

    `merge` x `merge` patches become one row. `grid_side` is the side of the learned position grid, `rotary_base` the
    base of the 2-D rotary, and `window` the side of an attention window in merged units; 0 means there is none.
    `full_layers` attend to whole frames anyway. After each of `deepstack_layers` the hidden state is also merged by
    `deepstack_merger`.
    """

    block: VisionBlockSpec
    depth: int
    patch: int
    merge: int
    temporal_patch: int = 1
    channels: int = 3
    patch_bias: bool = True
    grid_side: int = 0
    rotary_base: float = 0.0
    window: int = 0
    full_layers: frozenset[int] = frozenset()
    final_norm: NormSpec | None = None
    projector: MergerSpec | PoolSpec
    deepstack_layers: tuple[int, ...] = ()
    deepstack_merger: MergerSpec | None = None

    @property
    def patch_values(self) -> int:
        return self.channels * self.temporal_patch * self.patch * self.patch

    @property
    def unit(self) -> int:
        """Patches in a merged unit."""
        return self.merge * self.merge

    @property
    def levels(self) -> int:
        """Rows per merged unit: the projected one, then one for each deepstack layer."""
        return 1 + len(self.deepstack_layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Text models have no `vision`. With `sees_whole_image` the rows of an image attend to each other in both
    directions."""

    architecture: str
    max_position: int
    decoder: DecoderSpec
    vision: VisionSpec | None = None
    sees_whole_image: bool = False

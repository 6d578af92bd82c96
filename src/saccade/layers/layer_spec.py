"""Specifications of layers, as plain values. Needs no torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """RMS norm multiplies by `offset + weight`; layer norm has a bias and no offset."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float
    offset: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPSpec:
    """`width` is the inner width."""

    width: int
    activation: str
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """`width` is the inner width of one expert; `renormalise` makes the chosen experts' weights add up to 1."""

    num_experts: int
    top_k: int
    width: int
    activation: str
    renormalise: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Every frequency divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """The frequencies of long wavelengths divided by `factor`, of short ones kept, of those in between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """The frequencies that turn less than `slow_turns` times within `original_max_position` divided by `factor`, those
    that turn more than `fast_turns` times kept, those in between blended. Rotated queries and keys are multiplied by
    `gain`: attention folds it into its scale."""

    factor: float
    original_max_position: int
    fast_turns: float
    slow_turns: float
    is_truncated: bool
    gain: float

    @property
    def max_position(self) -> int:
        return int(self.original_max_position * self.factor)


Scaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RotarySpec:
    """`axes[i]` is the position axis that frequency i follows. `width` is the number of rotated columns of a head."""

    width: int
    base: float
    axes: tuple[int, ...]
    scaling: Scaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """`norm` normalises queries and keys per head before rotary."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool = False
    out_bias: bool = False
    norm: NormSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionBlockSpec:
    width: int
    num_heads: int
    norm: NormSpec
    mlp: MLPSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class MergerSpec:
    """An MLP turns the patches of a unit into one row of the decoder's width. The norm is over a patch, or with
    `norm_after_merge` over the joined patches."""

    out_width: int
    norm: NormSpec
    norm_after_merge: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """The patches of a unit are averaged, normalised and projected to the decoder's width."""

    out_width: int
    norm: NormSpec


def plain_axes(width: int) -> tuple[int, ...]:
    return (0,) * (width // 2)


def sectioned_axes(sections: tuple[int, ...]) -> tuple[int, ...]:
    """The first `sections[0]` frequencies follow time, the next height, the last width."""
    return tuple(axis for axis, count in enumerate(sections) for _ in range(count))


def interleaved_axes(sections: tuple[int, ...]) -> tuple[int, ...]:
    """Time, height and width take turns until height and width have all their frequencies; time takes the rest."""
    axes = [0] * sum(sections)
    for axis in (1, 2):
        for i in range(axis, min(3 * sections[axis], len(axes)), 3):
            axes[i] = axis
    return tuple(axes)

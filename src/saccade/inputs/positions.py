"""Rotary positions and attention limits of a prompt with images and videos. Loops run over spans, never over tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """Feature rows at `offset` of a prompt: those of media[media_idx] from `feature_offset` on. `grid_thw` counts
    merged patches; time steps are `interval` positions apart."""

    offset: int
    grid_thw: tuple[int, int, int]
    interval: float = 1.0
    media_idx: int = 0
    feature_offset: int = 0
    length: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", prod(self.grid_thw))


def text_positions(num_tokens: int) -> Ints:
    """Three equal rows, for models without M-RoPE and for prompts without media."""
    return np.tile(np.arange(num_tokens, dtype=np.int32), (3, 1))


def mrope_positions(num_tokens: int, blocks: Sequence[FeatureRows]) -> Ints:
    """Time, row and column of every token. Blocks are in order and do not overlap. Text counts up in all three rows. A
    block's grid starts at the current position, and the text after it continues from the larger of its height and
    width, as in transformers: time steps do not push that text back. A time step is multiplied by the interval before
    it is truncated, so that time advances even if the interval is below one: in float32, as in transformers, where an
    interval that rounding errors put just below a whole number is whole."""
    positions = np.empty((3, num_tokens), dtype=np.int32)
    at = position = 0
    for block in blocks:
        position = _fill_text(positions, at, block.offset, position)
        at = block.offset + block.length
        grid = np.indices(block.grid_thw, dtype=np.int32).reshape(3, -1)
        grid[0] = np.floor(grid[0].astype(np.float32) * np.float32(block.interval))
        positions[:, block.offset : at] = grid + position
        position += max(block.grid_thw[1:])
    _fill_text(positions, at, num_tokens, position)
    return positions


def rope_delta(positions_3T: Ints) -> int:
    """Added to a generated token's index to get its position."""
    num_tokens = positions_3T.shape[1]
    return int(positions_3T.max()) + 1 - num_tokens if num_tokens else 0


def bidirectional_limits(num_tokens: int, blocks: Sequence[FeatureRows]) -> Ints:
    """For each row, the end of the keys it may see: the end of its own image, or 0 for text (causal only)."""
    limits = np.zeros(num_tokens, dtype=np.int32)
    for block in blocks:
        limits[block.offset : block.offset + block.length] = block.offset + block.length
    return limits


def _fill_text(positions: Ints, start: int, stop: int, position: int) -> int:
    """Counts up through text and returns the position after it."""
    length = stop - start
    positions[:, start:stop] = np.arange(position, position + length, dtype=np.int32)
    return position + length

"""Positions, taps and boundaries of images and frames, as a vision pass reads them."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from saccade.geometry import Grid, GridSpec, geometry

MAX_CACHED_GRIDS = 256
MAX_CACHED_PATCHES = 8192  # of one grid: larger ones come seldom, and making them anew takes less than a pass


def vision_values(spec: GridSpec, grids: Sequence[Grid], patches_PC: Any, targets_U: Any) -> dict[str, Any]:
    """The inputs of a pass over these grids; row u of it goes to row targets[u] of the encoder cache."""
    return {"patches": patches_PC, "targets": targets_U, **Geometries(spec).packed(grids)}


class Geometries:
    """Positions, taps and boundaries of grids. Those of the grids seen last are remembered, unless they are large."""

    def __init__(self, spec: GridSpec) -> None:
        self._spec = spec
        self._remembered = lru_cache(maxsize=MAX_CACHED_GRIDS)(lambda grid: _geometry(spec, grid))

    def packed(self, grids: Sequence[Grid]) -> dict[str, Any]:
        """The geometry of several grids, put together from that of each; of none, arrays without rows."""
        return _packed(self._spec, [self._one(grid) for grid in grids] or [_geometry(self._spec)])

    def _one(self, grid: Grid) -> dict[str, Any]:
        is_small = grid[0] * grid[1] * grid[2] <= MAX_CACHED_PATCHES
        return self._remembered(grid) if is_small else _geometry(self._spec, grid)


def _packed(spec: GridSpec, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if len(parts) == 1:
        return dict(parts[0])
    values: dict[str, Any] = {}
    for name, axis in _JOINED.items():
        if name in parts[0]:
            values[name] = np.concatenate([part[name] for part in parts], axis=axis)
    for name in _BOUNDARIES:
        if name in parts[0]:
            lengths = [np.diff(part[name]) for part in parts]
            values[name] = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    if spec.window:
        starts = np.cumsum([0, *(len(part["window_order"]) for part in parts)])
        for name in ("window_order", "window_inverse"):
            values[name] = np.concatenate([part[name] + s for part, s in zip(parts, starts, strict=False)])
    return values


_JOINED = {"positions": 0, "grid_indices": 1, "grid_weights": 1}
_BOUNDARIES = ("cu_seqlens", "window_cu_seqlens")


def _geometry(spec: GridSpec, *grids: Grid) -> dict[str, Any]:
    found = geometry(spec, grids)
    for value in found.values():
        value.flags.writeable = False
    return found

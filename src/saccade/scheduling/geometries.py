"""Positions, taps and boundaries of images and frames, as a vision pass reads them."""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
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
        spec = self._spec
        parts = [
            self._remembered(grid) if prod(grid) <= MAX_CACHED_PATCHES else _geometry(spec, grid) for grid in grids
        ] or [_geometry(spec)]
        if len(parts) == 1:
            return dict(parts[0])
        values: dict[str, Any] = {}
        for name in parts[0]:
            found = [part[name] for part in parts]
            if name in ("window_order", "window_inverse"):
                starts = np.cumsum([0, *map(len, found[:-1])])
                found = [one + start for one, start in zip(found, starts, strict=True)]
            if name.endswith("cu_seqlens"):
                values[name] = np.concatenate([[0], np.cumsum(np.concatenate([np.diff(one) for one in found]))])
            else:
                values[name] = np.concatenate(found, axis=1 if name in ("grid_indices", "grid_weights") else 0)
        return values


def _geometry(spec: GridSpec, *grids: Grid) -> dict[str, Any]:
    places = geometry(spec, grids)
    values = {
        "cu_seqlens": places.cu_seqlens_S1,
        "positions": places.positions_P2,
        "grid_indices": places.grid_indices_4P,
        "grid_weights": places.grid_weights_4P,
        "window_order": places.window_order_U,
        "window_inverse": places.window_inverse_U,
        "window_cu_seqlens": places.window_cu_seqlens_W1,
    }
    found = {name: value for name, value in values.items() if value is not None}
    for value in found.values():
        value.flags.writeable = False
    return found

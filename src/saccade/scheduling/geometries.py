"""Positions, taps and boundaries of images and frames for a vision pass: host arrays made from grids, which are
(frames, rows, columns) in patches. I media items, P patches, U merged units, S frames, W windows. All functions process
packed patches at once, without a loop over images."""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from saccade.errors import ConfigError
from saccade.models.model_spec import VisionSpec

Grid = tuple[int, int, int]
Ints = NDArray[np.int32]
Floats = NDArray[np.float32]

MAX_CACHED_GRIDS = 256
MAX_CACHED_PATCHES = 8192  # of one grid; larger grids are rare, and recomputing one takes less time than its pass


def vision_values(spec: VisionSpec, grids: Sequence[Grid], patches_PC: Any, targets_U: Any) -> dict[str, Any]:
    """Inputs of a pass over these grids. Its row u goes to row targets[u] of the encoder cache."""
    return {"patches": patches_PC, "targets": targets_U, **Geometries(spec).packed(grids)}


class Geometries:
    """Positions, taps and boundaries of grids, with a cache of recent grids up to a size."""

    def __init__(self, spec: VisionSpec) -> None:
        self._spec = spec
        self._remembered = lru_cache(maxsize=MAX_CACHED_GRIDS)(lambda grid: geometry(spec, [grid]))

    def packed(self, grids: Sequence[Grid]) -> dict[str, Any]:
        """Geometry of several grids, joined from that of each. Without grids, arrays without rows."""
        parts = [
            self._remembered(grid) if prod(grid) <= MAX_CACHED_PATCHES else geometry(self._spec, [grid])
            for grid in grids
        ] or [geometry(self._spec, [])]
        if len(parts) == 1:
            return dict(parts[0])
        values: dict[str, Any] = {}
        for name in parts[0]:
            found = [part[name] for part in parts]
            if name in ("window_order", "window_inverse"):
                starts = np.cumsum([0, *map(len, found[:-1])], dtype=np.int32)
                found = [one + start for one, start in zip(found, starts, strict=True)]
            if name.endswith("cu_seqlens"):
                values[name] = _boundaries(np.concatenate([np.diff(one) for one in found]))
            else:
                values[name] = np.concatenate(found, axis=1 if name in ("grid_indices", "grid_weights") else 0)
        return values


def geometry(spec: VisionSpec, grids: Sequence[Grid]) -> dict[str, NDArray[Any]]:
    grids_I3 = np.asarray(grids, dtype=np.int64).reshape(-1, 3)
    _check(spec, grids_I3)
    frame_sizes = np.repeat(grids_I3[:, 1] * grids_I3[:, 2], grids_I3[:, 0])
    found: dict[str, NDArray[Any]] = {
        "cu_seqlens": _boundaries(frame_sizes),
        "positions": patch_positions(grids_I3, spec.merge),
    }
    if spec.grid_side:
        found["grid_indices"], found["grid_weights"] = grid_taps(grids_I3, spec.merge, spec.grid_side)
    if spec.window:
        order_U, sizes = window_order(grids_I3, spec.merge, spec.window)
        found["window_order"], found["window_inverse"] = order_U.astype(np.int32), np.argsort(order_U).astype(np.int32)
        found["window_cu_seqlens"] = _boundaries(sizes * spec.unit)
    for value in found.values():
        value.flags.writeable = False  # they may be cached
    return found


def patch_positions(grids_I3: NDArray[np.int64], merge: int) -> Ints:
    """(row, column) of each patch in merge-block order."""
    sizes_I = grids_I3.prod(axis=1)
    columns_P = np.repeat(grids_I3[:, 2], sizes_I)
    frame_P = np.repeat(grids_I3[:, 1] * grids_I3[:, 2], sizes_I)
    place_P = _places(sizes_I) % frame_P
    unit_P, inner_P = np.divmod(place_P, merge * merge)
    unit_row_P, unit_column_P = np.divmod(unit_P, columns_P // merge)
    rows_P = unit_row_P * merge + inner_P // merge
    return np.stack([rows_P, unit_column_P * merge + inner_P % merge], axis=1).astype(np.int32)


def grid_taps(grids_I3: NDArray[np.int64], merge: int, side: int) -> tuple[Ints, Floats]:
    """Bilinear taps into a `side` x `side` grid whose corners are the corners of each image, in float32."""
    positions_P2 = patch_positions(grids_I3, merge).astype(np.float32)
    last_P2 = np.repeat(np.maximum(grids_I3[:, 1:] - 1, 1), grids_I3.prod(axis=1), axis=0)
    spots_P2 = positions_P2 * np.float32(side - 1) / last_P2.astype(np.float32)
    floors_P2 = np.floor(spots_P2)
    fractions_P2 = spots_P2 - floors_P2
    low_P2 = floors_P2.astype(np.int32)
    high_P2 = np.minimum(low_P2 + 1, side - 1)
    taps = [(r, c) for r in (0, 1) for c in (0, 1)]
    near_far = np.stack([low_P2, high_P2])
    shares = np.stack([np.float32(1.0) - fractions_P2, fractions_P2])
    indices = np.stack([near_far[r, :, 0] * side + near_far[c, :, 1] for r, c in taps])
    weights = np.stack([shares[r, :, 0] * shares[c, :, 1] for r, c in taps])
    return indices.astype(np.int32), weights.astype(np.float32)


def window_order(grids_I3: NDArray[np.int64], merge: int, window: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Merged units sorted by window, and the number of units in each window."""
    shapes_I3 = grids_I3 // (1, merge, merge)
    sizes_I = shapes_I3.prod(axis=1)
    across_I = -(-shapes_I3[:, 2] // window)
    per_frame_I = -(-shapes_I3[:, 1] // window) * across_I
    first_I = np.cumsum(shapes_I3[:, 0] * per_frame_I) - shapes_I3[:, 0] * per_frame_I
    columns_U = np.repeat(shapes_I3[:, 2], sizes_I)
    rows_U, column_U = np.divmod(_places(sizes_I), columns_U)
    frame_U, row_U = np.divmod(rows_U, np.repeat(shapes_I3[:, 1], sizes_I))
    window_U = np.repeat(first_I, sizes_I) + frame_U * np.repeat(per_frame_I, sizes_I)
    window_U += row_U // window * np.repeat(across_I, sizes_I) + column_U // window
    return np.argsort(window_U, kind="stable"), np.bincount(window_U)


def _check(spec: VisionSpec, grids_I3: NDArray[np.int64]) -> None:
    bad = (grids_I3 < 1).any(axis=1) | (grids_I3[:, 1:] % spec.merge != 0).any(axis=1)
    if bad.any():
        raise ConfigError(
            f"grid {tuple(grids_I3[bad][0].tolist())} is not a whole number of {spec.merge}x{spec.merge} patch units"
        )


def _places(sizes_I: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, ... within each item of a packed sequence."""
    return np.arange(sizes_I.sum()) - np.repeat(np.cumsum(sizes_I) - sizes_I, sizes_I)


def _boundaries(sizes: NDArray[np.integer[Any]]) -> Ints:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)

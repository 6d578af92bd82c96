"""Steps of a vision tower from grids and patches."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.layers.step import VisionStep
from saccade.models.model_spec import VisionSpec
from saccade.scheduling.geometries import Grid, geometry

SUFFIXES = {"positions": "P2", "cu_seqlens": "S1", "window_cu_seqlens": "W1"}


def vision_step(spec: VisionSpec, grids: Sequence[Grid], patches_PC: Tensor) -> VisionStep:
    """A step over these patches, on their device. Rows after those of the grids are padding: separate frames and
    windows, no longer than the longest allowed, which read position 0 with weight 0."""
    found = geometry(spec, grids)
    num_rows = len(patches_PC)
    padding = num_rows - len(found["positions"])
    assert padding >= 0 and num_rows % spec.unit == 0, (patches_PC.shape, grids)
    found["positions"] = np.pad(found["positions"], ((0, padding), (0, 0)))
    max_segment = max(int(np.diff(found["cu_seqlens"]).max(initial=0)), padding, 1)
    found["cu_seqlens"] = _ended(found["cu_seqlens"], num_rows, max_segment)
    for name in found.keys() & {"grid_indices", "grid_weights"}:
        found[name] = np.pad(found[name], ((0, 0), (0, padding)))
    max_window = spec.window * spec.window * spec.unit
    if spec.window:
        tail = np.arange(len(found["window_order"]), num_rows // spec.unit, dtype=np.int32)
        for name in ("window_order", "window_inverse"):
            found[name] = np.concatenate([found[name], tail])
        found["window_cu_seqlens"] = _ended(found["window_cu_seqlens"], num_rows, max_window)
    fields: dict[str, Any] = {
        named(name): torch.from_numpy(value).to(patches_PC.device) for name, value in found.items()
    }
    return VisionStep(patches_PC=patches_PC, max_segment=max_segment, max_window=max_window, **fields)


def named(name: str) -> str:
    """The field of a step."""
    return f"{name}_{SUFFIXES.get(name, '4P' if name.startswith('grid') else 'U')}"


def _ended(boundaries: Any, num_rows: int, largest: int) -> Any:
    more = [*range(int(boundaries[-1]), num_rows, largest)[1:], num_rows] if boundaries[-1] < num_rows else []
    return np.concatenate([boundaries, np.asarray(more, dtype=np.int32)])

"""The vision pass as a phase: patches of any images and frames to rows of the encoder cache. Boundaries, windows,
positions and where the rows go are data.

P patches, U merged units, C values of a patch, L levels, D width of the decoder.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.execution.state import DeviceState
from saccade.geometry import Grid, geometry
from saccade.graphs import (
    Arena,
    Buffer,
    Capacity,
    Frame,
    OwnIndex,
    Phase,
    Watched,
    boundaries,
    metadata,
    output,
    row_buckets,
    rows,
)
from saccade.layers.step import VisionStep
from saccade.models.spec import VisionSpec
from saccade.models.vlm import Model

MAX_FRAMES = 64  # images and frames of one pass
# Attention visits empty segments, too, so a bucket has room for no more frames than are likely: of 24 rows and more (an
# image of 224x224 has 49). Smaller ones take a larger bucket.
UNITS_PER_FRAME = 24
FEWEST_FRAMES = 4
UNITS_PER_WINDOW = 4  # fewer on average, and a batch has too many windows for its bucket
TYPICAL_UNITS = 324  # of an image: 560 x 560 pixels with patches of 16
MAX_CACHED_GRIDS = 256
MAX_CACHED_PATCHES = 8192  # of one grid: larger ones come seldom, and making them anew takes less than a pass


def vision_phase(model: Model, state: DeviceState, max_units: int) -> Phase:
    spec = model.spec.vision
    assert spec is not None and model.tower is not None and state.vision_rows is not None
    tower, vision_rows = model.tower, state.vision_rows

    def body(frame: Frame) -> dict[str, Tensor]:
        rows_LUD = tower(_step(spec, frame), frame["rows"])
        model.place.kernels.scatter_rows(rows_LUD, frame["targets"], vision_rows)
        return {"rows": rows_LUD}

    def example(lengths: tuple[int, ...], rng: torch.Generator) -> dict[str, Any]:
        grids = [_example_grid(length, spec.merge) for length in lengths]
        count = sum(lengths) * spec.unit
        seed = int(torch.randint(2**31, (), generator=rng))
        on_device = torch.Generator(model.place.device).manual_seed(seed)  # thousands of patches: no work for a CPU
        patches = torch.randn(
            count, spec.patch_values, generator=on_device, device=model.place.device, dtype=model.place.dtype
        )
        return vision_values(spec, grids, patches, _example_targets(sum(lengths), vision_rows.shape[1], seed))

    def clear(values: Mapping[str, Any]) -> None:
        vision_rows.index_fill_(1, _targets(values, vision_rows), 0)

    def written(values: Mapping[str, Any]) -> dict[str, Tensor]:
        return {"rows of the cache": vision_rows.index_select(1, _targets(values, vision_rows))}

    buckets = tuple(_capacity(spec, units) for units in vision_buckets(max_units))
    return Phase(
        name="vision",
        body=body,
        arena=Arena(_buffers(model, spec), buckets[-1], model.place.device),
        rows="units",
        buckets=buckets,
        example=example,
        state=Watched(dict(tower.homes()), dict(tower.links())) | {"vision rows": vision_rows},
        typical=TYPICAL_UNITS,
        is_repeatable=True,
        set_up=clear,
        written=written,
        writes=frozenset({"vision rows"}),
    )


def _example_grid(num_units: int, merge: int) -> tuple[int, int, int]:
    """As near to a square as the number lets it: windows of a strip are smaller than those of pictures."""
    height = max(n for n in range(1, math.isqrt(num_units) + 1) if num_units % n == 0)
    return 1, merge * height, merge * (num_units // height)


def _example_targets(count: int, num_rows: int, seed: int) -> Any:
    """Any rows of the cache but padding's, each once where there are as many."""
    return np.resize(np.random.default_rng(seed).permutation(num_rows - 1) + 1, count)


def _targets(values: Mapping[str, Any], vision_rows: Tensor) -> Tensor:
    """Where the rows of a pass go; none where two would go to the same place."""
    targets = np.asarray(values["targets"], dtype=np.int64)
    is_clear = len(targets) < vision_rows.shape[1]
    return torch.from_numpy(targets[: len(targets) * is_clear]).to(vision_rows.device)


def vision_buckets(max_units: int) -> tuple[int, ...]:
    """Rows of the passes that get a graph, in few steps where a pass is short.

    Steps are a quarter of an octave up to 256 rows, and an eighth above, where padding costs milliseconds. They lie
    1/48 above round numbers: images are squares of small numbers, and 49, 196, 324, 784 rows (224, 448, 560, 896 pixels
    a side for patches of 16) are just above round ones, which would pad them by 9 %.
    """
    fine, coarse = (row_buckets(max_units, smallest=32, per_octave=n) for n in (8, 4))
    chosen = [n for n in coarse if n <= 256] + [n for n in fine if n > 256]
    return tuple(sorted({min(round(n * 49 / 48), max_units) for n in chosen} | {max_units}))


def vision_values(spec: VisionSpec, grids: Sequence[Grid], patches_PC: Tensor, targets_U: Any) -> dict[str, Any]:
    """The inputs of a pass over these grids; row u of it goes to row targets[u] of the encoder cache."""
    return {"patches": patches_PC, "targets": targets_U, **Geometries(spec).packed(grids)}


class Geometries:
    """Positions, taps and boundaries of grids. Those of the grids seen last are remembered, unless they are large."""

    def __init__(self, spec: VisionSpec) -> None:
        self._spec = spec
        self._remembered = lru_cache(maxsize=MAX_CACHED_GRIDS)(lambda grid: _geometry(spec, grid))

    def packed(self, grids: Sequence[Grid]) -> dict[str, Any]:
        """Of several grids, put together from those of each."""
        return _packed(self._spec, [self._one(grid) for grid in grids])

    def _one(self, grid: Grid) -> dict[str, Any]:
        is_small = grid[0] * grid[1] * grid[2] <= MAX_CACHED_PATCHES
        return self._remembered(grid) if is_small else _geometry(self._spec, grid)


def _packed(spec: VisionSpec, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
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


def _geometry(spec: VisionSpec, grid: Grid) -> dict[str, Any]:
    places = geometry(spec, [grid])
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


def _buffers(model: Model, spec: VisionSpec) -> list[Buffer]:
    dtype = model.place.dtype
    buffers = [
        rows("patches", ("patches", spec.patch_values), dtype),
        metadata("targets", ("units",), torch.int64),
        boundaries("cu_seqlens", of="patches", count="frames"),
        metadata("positions", ("patches", 2)),
        output("rows", (spec.levels, "units", model.spec.decoder.width), dtype),
    ]
    if spec.grid_side:
        buffers.append(metadata("grid_indices", (4, "patches")))
        buffers.append(metadata("grid_weights", (4, "patches"), torch.float32))
    if spec.window:
        buffers.append(metadata("window_order", ("units",), padding=OwnIndex()))
        buffers.append(metadata("window_inverse", ("units",), padding=OwnIndex()))
        buffers.append(boundaries("window_cu_seqlens", of="patches", count="windows", longest=_longest_window(spec)))
    return buffers


def _capacity(spec: VisionSpec, units: int) -> Capacity:
    frames = min(MAX_FRAMES, max(FEWEST_FRAMES, units // UNITS_PER_FRAME), units)
    sizes = {"units": units, "patches": units * spec.unit, "frames": frames + 1}
    if spec.window:
        sizes["windows"] = units // UNITS_PER_WINDOW + MAX_FRAMES
    return Capacity.of(sizes)


def _step(spec: VisionSpec, frame: Frame) -> VisionStep:
    has_windows = bool(spec.window)
    return VisionStep(
        patches_PC=frame["patches"],
        positions_P2=frame["positions"],
        cu_seqlens_S1=frame["cu_seqlens"],
        max_segment=frame.longest("cu_seqlens"),
        grid_indices_4P=frame["grid_indices"] if spec.grid_side else None,
        grid_weights_4P=frame["grid_weights"] if spec.grid_side else None,
        window_order_U=frame["window_order"] if has_windows else None,
        window_inverse_U=frame["window_inverse"] if has_windows else None,
        window_cu_seqlens_W1=frame["window_cu_seqlens"] if has_windows else None,
        max_window=_longest_window(spec) if has_windows else 0,
        is_sketch=frame.is_sketch,
    )


def _longest_window(spec: VisionSpec) -> int:
    return spec.window * spec.window * spec.unit

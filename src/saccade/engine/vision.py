"""The vision pass as a phase: patches of any images and frames to rows of the encoder cache. Boundaries, windows,
positions and where the rows go are data.

P patches, U merged units, C values of a patch, L levels, D width of the decoder.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.engine.state import DeviceState
from saccade.graphs import (
    Arena,
    Buffer,
    Capacity,
    Frame,
    OwnIndex,
    Phase,
    boundaries,
    metadata,
    output,
    row_buckets,
    rows,
)
from saccade.layers.step import VisionStep
from saccade.models.geometry import Grid, geometry
from saccade.models.spec import VisionSpec
from saccade.models.vlm import Model

MAX_FRAMES = 64  # images and frames of one pass; more run eagerly
UNITS_PER_WINDOW = 4  # fewer on average, and a batch has too many windows for its bucket


def vision_phase(model: Model, state: DeviceState, max_units: int) -> Phase:
    spec = model.spec.vision
    assert spec is not None and model.tower is not None and state.vision_rows is not None
    tower, vision_rows = model.tower, state.vision_rows

    def body(frame: Frame) -> dict[str, Tensor]:
        rows_LUD = tower(_step(spec, frame))
        vision_rows.index_copy_(1, frame["targets"], rows_LUD)
        return {"rows": rows_LUD}

    def example(lengths: tuple[int, ...], rng: torch.Generator) -> dict[str, Any]:
        grids = [(1, spec.merge, spec.merge * length) for length in lengths]
        count = sum(lengths) * spec.unit
        seed = int(torch.randint(2**31, (), generator=rng))
        on_device = torch.Generator(model.place.device).manual_seed(seed)  # thousands of patches: no work for a CPU
        patches = torch.randn(
            count, spec.patch_values, generator=on_device, device=model.place.device, dtype=model.place.dtype
        )
        return vision_values(spec, grids, patches, np.zeros(sum(lengths), dtype=np.int64))

    buckets = tuple(_capacity(spec, units) for units in row_buckets(max_units, smallest=32))
    return Phase(
        name="vision",
        body=body,
        arena=Arena(_buffers(model, spec), buckets[-1], model.place.device),
        rows="units",
        buckets=buckets,
        example=example,
        state=state.watched(),
    )


def vision_values(spec: VisionSpec, grids: Sequence[Grid], patches_PC: Tensor, targets_U: Any) -> dict[str, Any]:
    """The inputs of a pass over these grids; row u of it goes to row targets[u] of the encoder cache."""
    places = geometry(spec, grids)
    values = {
        "patches": patches_PC,
        "targets": targets_U,
        "cu_seqlens": places.cu_seqlens_S1,
        "positions": places.positions_P2,
        "grid_indices": places.grid_indices_4P,
        "grid_weights": places.grid_weights_4P,
        "window_order": places.window_order_U,
        "window_inverse": places.window_inverse_U,
        "window_cu_seqlens": places.window_cu_seqlens_W1,
    }
    return {name: value for name, value in values.items() if value is not None}


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
    sizes = {"units": units, "patches": units * spec.unit, "frames": min(MAX_FRAMES, units) + 1}
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
    )


def _longest_window(spec: VisionSpec) -> int:
    return spec.window * spec.window * spec.unit

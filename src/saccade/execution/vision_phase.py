"""The vision phase: turns patches of any images and frames into rows of the encoder cache. Boundaries, windows,
positions and target rows are data. Where each rank encodes its own images, a pass writes the rows of all ranks: one
share after the other, each as long as the bucket. All ranks know all targets.

P patches, U merged units (of all ranks), C values of a patch, L levels, D width of the decoder.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.execution.state import DeviceState
from saccade.graphs import Arena, Buffer, Frame, OwnIndex, Phase, Watched, boundaries, metadata, output, rows
from saccade.layers.layer import EXCHANGE_MEMORY
from saccade.layers.step import VisionStep
from saccade.models.model_spec import VisionSpec
from saccade.models.vlm import Model
from saccade.scheduling.buckets import PART_UNITS, longest_window, vision_buckets, vision_capacity, vision_parts
from saccade.scheduling.geometries import vision_values

TYPICAL_UNITS = 324  # of an image of 560 x 560 pixels with patches of 16


def vision_phase(model: Model, state: DeviceState, max_units: int, part_units: int = PART_UNITS) -> Phase:
    spec = model.spec.vision
    assert spec is not None and model.tower is not None and state.vision_rows is not None
    tower, vision_rows = model.tower, state.vision_rows
    sharing = tower.sharing

    def body(frame: Frame) -> dict[str, Tensor]:
        out, targets = frame["rows"], frame["targets"]
        if sharing.size > 1:
            out, targets = out.flatten(1, 2), targets.flatten()
        num_parts = vision_parts(frame.capacity["units"], spec.depth, part_units)
        rows_LUD = tower(_step(spec, frame, num_parts), out)
        model.place.kernels.scatter_rows(rows_LUD, targets, vision_rows)
        return {"rows": rows_LUD}

    def example(lengths: tuple[int, ...], rng: torch.Generator) -> dict[str, Any]:
        grids = [_example_grid(length, spec.merge) for length in lengths]
        count = sum(lengths) * spec.unit
        seed = int(torch.randint(2**31, (), generator=rng))
        own_seed = seed + sharing.rank  # differs where each rank encodes its own images
        on_device = torch.Generator(model.place.device).manual_seed(own_seed)  # a CPU is too slow for many patches
        patches = torch.randn(
            count, spec.patch_values, generator=on_device, device=model.place.device, dtype=model.place.dtype
        )
        shape = (sum(lengths),) if sharing.size == 1 else (sharing.size, sum(lengths))
        return vision_values(spec, grids, patches, _example_targets(shape, vision_rows.shape[1], seed))

    def clear(values: Mapping[str, Any]) -> None:
        vision_rows.index_fill_(1, _targets(values, vision_rows), 0)

    def written(values: Mapping[str, Any]) -> dict[str, Tensor]:
        return {"rows of the cache": vision_rows.index_select(1, _targets(values, vision_rows))}

    has_shares = sharing.size > 1
    buckets = tuple(vision_capacity(spec, units, has_shares=has_shares) for units in vision_buckets(max_units))
    return Phase(
        name="vision",
        body=body,
        arena=Arena(_buffers(model, spec, sharing.size), buckets[-1], model.place.device),
        rows="units",
        buckets=buckets,
        example=example,
        state=Watched(dict(tower.parameter_locations()), dict(tower.reference_locations()))
        | {"vision rows": vision_rows},
        typical=TYPICAL_UNITS,
        is_repeatable=True,
        set_up=clear,
        written=written,
        writes=frozenset({"vision rows"} | ({EXCHANGE_MEMORY} if tower.exchange is not None else set())),
    )


def _example_grid(num_units: int, merge: int) -> tuple[int, int, int]:
    """A grid as square as possible, because a strip would have smaller windows."""
    height = max(n for n in range(1, math.isqrt(num_units) + 1) if num_units % n == 0)
    return 1, merge * height, merge * (num_units // height)


def _example_targets(shape: tuple[int, ...], num_rows: int, seed: int) -> Any:
    """Distinct random rows of the cache. If there are too few, random units go to the padding row."""
    chance, count = np.random.default_rng(seed), math.prod(shape)
    found = np.zeros(max(count, num_rows - 1), dtype=np.int64)
    found[: num_rows - 1] = chance.permutation(num_rows - 1) + 1
    return (found[:count] if count < num_rows else chance.permutation(found)).reshape(shape)


def _targets(values: Mapping[str, Any], vision_rows: Tensor) -> Tensor:
    """Target rows of a pass, without padding."""
    targets = np.asarray(values["targets"], dtype=np.int64)
    return torch.from_numpy(targets[targets > 0]).to(vision_rows.device)


def _buffers(model: Model, spec: VisionSpec, num_shares: int) -> list[Buffer]:
    dtype = model.place.dtype
    all_rows: tuple[int | str, ...] = ("units",) if num_shares == 1 else (num_shares, "share")
    buffers = [
        rows("patches", ("patches", spec.patch_values), dtype),
        metadata("targets", all_rows, torch.int64),
        boundaries("cu_seqlens", of="patches", count="frames"),
        metadata("positions", ("patches", 2)),
        output("rows", (spec.levels, *all_rows, model.spec.decoder.width), dtype),
    ]
    if spec.grid_side:
        buffers.append(metadata("grid_indices", (4, "patches")))
        buffers.append(metadata("grid_weights", (4, "patches"), torch.float32))
    if spec.window:
        buffers.append(metadata("window_order", ("units",), padding=OwnIndex()))
        buffers.append(metadata("window_inverse", ("units",), padding=OwnIndex()))
        buffers.append(boundaries("window_cu_seqlens", of="patches", count="windows", longest=longest_window(spec)))
    return buffers


def _step(spec: VisionSpec, frame: Frame, num_parts: int) -> VisionStep:
    has_windows = bool(spec.window)
    ends = (spec.depth * part // num_parts for part in range(1, num_parts))  # blocks are about equally long
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
        max_window=longest_window(spec) if has_windows else 0,
        cuts=frozenset(end - 1 for end in ends),
        cut=frame.cut,
        is_warmup=frame.is_warmup,
    )

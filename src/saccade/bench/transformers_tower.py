"""The vision tower of Hugging Face transformers, for comparison. The package is no dependency: it is looked for only
when a comparison is asked for."""

import importlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from saccade.bench.timing import latency_ms
from saccade.errors import ConfigError


def time_transformers(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    patch_values: int,
    grids: Sequence[tuple[int, int, int]],
    rounds: int,
) -> tuple[float, float]:
    """Milliseconds of its tower on packed patches of these grids, and how long the host is busy."""
    tower = _tower(str(folder), device, dtype)
    count = sum(frames * rows * columns for frames, rows, columns in grids)
    patches = torch.randn(count, patch_values, device=device, dtype=dtype)
    shapes = torch.tensor(list(grids), device=device)

    @torch.no_grad()
    def call() -> None:
        tower(patches, grid_thw=shapes)

    return latency_ms(call, device, rounds)


@lru_cache(maxsize=1)
def _tower(folder: str, device: torch.device, dtype: torch.dtype) -> Any:
    """With made-up weights: time does not depend on them."""
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise ConfigError(
            "transformers is not installed; `pip install transformers` for --compare-transformers"
        ) from None
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=dtype)
    tower = getattr(getattr(model, "model", model), "visual", None)
    if tower is None:
        raise ConfigError(f"{config.model_type} has no tower over packed patches; only Qwen-VL models are compared")
    tower = tower.to_empty(device=device).eval()
    with torch.no_grad():
        for tensor in (*tower.parameters(), *tower.buffers()):
            tensor.normal_(std=0.02)
    return tower

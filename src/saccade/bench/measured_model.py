"""The model that a benchmark measures: loaded as its settings say, and described beside the figures."""

from typing import Any

import torch

from saccade.bench.settings import ModelBenchSettings
from saccade.errors import ConfigError
from saccade.models.vlm import Model
from saccade.models.weights import DTYPES, load_model


def load_measured(name: str, settings: ModelBenchSettings, device: torch.device) -> Model:
    dtype = torch.float32 if device.type == "cpu" else None
    if settings.dtype != "auto":
        if settings.dtype not in DTYPES:
            raise ConfigError(f"dtype is {settings.dtype!r}; allowed: auto, {', '.join(DTYPES)} (--dtype)")
        dtype = DTYPES[settings.dtype]
    return load_model(name, device=device, dtype=dtype, load_format=settings.load_format)  # type: ignore[arg-type]


def describe_model(model: Model) -> dict[str, Any]:
    place = model.place
    return {
        "device": torch.cuda.get_device_name(place.device) if place.device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "model": model.spec.architecture,
        "layers": len(model.spec.decoder.layers),
        "dtype": str(place.dtype).removeprefix("torch."),
        "kernels": place.kernels.name,
    }

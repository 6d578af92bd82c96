"""Steps of a vision tower from geometry and patches."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.geometry import Geometry
from saccade.layers.step import VisionStep


def vision_step(places: Geometry, patches_PC: Tensor) -> VisionStep:
    """A step over these patches, on their device."""
    assert patches_PC.shape[0] == len(places.positions_P2), (patches_PC.shape, places.positions_P2.shape)
    fields: dict[str, Any] = {name: getattr(places, name) for name in places.__dataclass_fields__}
    arrays = {name: value for name, value in fields.items() if isinstance(value, np.ndarray)}
    tensors = {name: torch.from_numpy(value).to(patches_PC.device) for name, value in arrays.items()}
    return VisionStep(patches_PC=patches_PC, **(fields | tensors))

"""Copies between host and device through pinned memory, without waiting."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.scheduling.orders import Array

_TORCH_DTYPES = {"uint8": torch.uint8, "int32": torch.int32, "int64": torch.int64, "float32": torch.float32}


def to_device(array: Array, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return torch.from_numpy(np.array(array))  # arrays may be read-only, which torch does not support
    pinned = torch.empty(array.shape, dtype=_TORCH_DTYPES[array.dtype.name], pin_memory=True)
    pinned_array: Any = pinned.numpy()
    pinned_array[...] = array
    return pinned.to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """A host copy, which is complete once the current stream reaches this point."""
    if tensor.device.type != "cuda":
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

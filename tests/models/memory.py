"""A checkpoint that is already in memory."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.kernels.dispatch import kernels_for
from saccade.layers.layer import Placement
from saccade.models.model_config import Config
from saccade.models.registry import read_spec
from saccade.models.vlm import Model
from saccade.models.weights import fill


@dataclass(frozen=True)
class Memory:
    values: Mapping[str, Tensor]
    where: str = "memory"

    @property
    def total_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.values.values())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.values.items())


def model_of(
    config: Mapping[str, object],
    tensors: Mapping[str, Tensor],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Model:
    device = torch.device(device)
    family, spec = read_spec(Config(config))
    model = Model(Placement(kernels=kernels_for(device, dtype), device=device, dtype=dtype), spec)
    fill(model, family.renames, Memory(tensors))
    return model

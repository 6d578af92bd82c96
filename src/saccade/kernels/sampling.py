"""Which implementation of sampling a device gets, chosen once."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from saccade.errors import ConfigError
from saccade.kernels import reference_sampling


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling functions of one device; `reference_sampling` has their signatures and meaning.

    Penalties keep one tensor: `seen_SV`, int32, a row of zeros per slot of a running request. Its sign bit says that
    a token is in the prompt, the rest counts its outputs. An entry of both kinds is one load, and both are set by
    atomics. On a GPU the last dimension of every tensor must be contiguous.
    """

    name: str
    greedy: Callable[..., Tensor]
    has_nan: Callable[[Tensor], Tensor]
    sample: Callable[..., Tensor]
    logprobs: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor, Tensor]]
    penalise: Callable[..., None]
    mark_prompt: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    count_tokens: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    forget: Callable[[Tensor, Tensor], None]
    apply_bias: Callable[[Tensor, Tensor, Tensor], None]
    suppress: Callable[[Tensor, Tensor, Tensor], None]
    allow_only: Callable[[Tensor, Tensor], None]


def sampling_for(device: torch.device | str) -> Sampling:
    """Plain torch on a CPU, Triton on a GPU."""
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"there is no sampling for device {device}; allowed: cpu, cuda")
    is_cpu = device.type == "cpu"
    module = reference_sampling if is_cpu else importlib.import_module("saccade.kernels.fused_sampling")
    functions = {f.name: getattr(module, f.name) for f in fields(Sampling) if f.name != "name"}
    return Sampling(name="reference" if is_cpu else "triton", **functions)

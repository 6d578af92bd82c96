"""Which implementation of sampling a device gets, chosen once."""

import importlib
from dataclasses import dataclass

import torch

from saccade.errors import ConfigError
from saccade.kernels import reference_sampling
from saccade.kernels.table import KernelTable


@dataclass(frozen=True)
class Sampling(KernelTable):
    """The sampling functions of one device.

    Penalties keep one tensor: `seen_SV`, int32, a row of zeros per slot of a running request. Its sign bit says that
    a token is in the prompt, the rest counts its outputs. An entry of both kinds is one load, and both are set by
    atomics. On a GPU the last dimension of every tensor must be contiguous.
    """

    greedy = staticmethod(reference_sampling.greedy)
    sample = staticmethod(reference_sampling.sample)
    logprobs = staticmethod(reference_sampling.logprobs)
    penalise = staticmethod(reference_sampling.penalise)
    mark_prompt = staticmethod(reference_sampling.mark_prompt)
    count_tokens = staticmethod(reference_sampling.count_tokens)
    apply_bias = staticmethod(reference_sampling.apply_bias)
    suppress = staticmethod(reference_sampling.suppress)
    allow_only = staticmethod(reference_sampling.allow_only)


def sampling_for(device: torch.device | str) -> Sampling:
    """Plain torch on a CPU, Triton on a GPU."""
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"there is no sampling for device {device}; allowed: cpu, cuda")
    if device.type == "cpu":
        return Sampling("reference", {})
    module = importlib.import_module("saccade.kernels.fused_sampling")
    return Sampling("triton", {name: getattr(module, name) for name in Sampling.kernel_names()})

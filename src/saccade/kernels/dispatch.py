"""Chooses, once, the implementation of each kernel for a device; layers receive the result."""

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

from saccade.config import use_private_kernel_cache
from saccade.errors import ConfigError
from saccade.kernels import reference, reference_sampling
from saccade.kernels.backends import AttentionBackend, AttentionDispatch

_HOPPER = (9, 0)
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class KernelTable:
    """Kernels by name. A subclass's static methods are plain-torch oracles, which `functions` may replace. Replacements
    have the oracle's signature, so mypy checks every call."""

    name: str
    functions: Mapping[str, Callable[..., Any]]

    def __post_init__(self) -> None:
        unknown = self.functions.keys() - set(self.kernel_names())
        assert not unknown, f"{type(self).__name__} has no kernel called {', '.join(sorted(unknown))}"
        vars(self).update(self.functions)

    @classmethod
    def kernel_names(cls) -> list[str]:
        return [name for name, value in vars(cls).items() if isinstance(value, staticmethod)]

    def replacing(self, **functions: Callable[..., Any]) -> Self:
        return replace(self, functions={**self.functions, **functions})


@dataclass(frozen=True)
class Kernels(KernelTable):
    """The kernels of one device and dtype. `reasons` says, by kernel, why an implementation was chosen."""

    linear = staticmethod(reference.linear)
    gated_linear = staticmethod(reference.gated_linear)
    activated_linear = staticmethod(reference.activated_linear)
    rms_norm = staticmethod(reference.rms_norm)
    add_rms_norm = staticmethod(reference.add_rms_norm)
    layer_norm = staticmethod(reference.layer_norm)
    add_layer_norm = staticmethod(reference.add_layer_norm)
    gated_activation = staticmethod(reference.gated_activation)
    qk_norm_rotary_store = staticmethod(reference.qk_norm_rotary_store)
    varlen_attention = staticmethod(reference.varlen_attention)
    paged_attention = staticmethod(reference.paged_attention)
    rotate_packed = staticmethod(reference.rotate_packed)
    add_positions = staticmethod(reference.add_positions)
    scatter_rows = staticmethod(reference.scatter_rows)
    place_rows = staticmethod(reference.place_rows)
    reasons: dict[str, str] = field(default_factory=dict)
    compilers: tuple[Callable[[torch.device, torch.dtype], None], ...] = ()

    def compile(self, device: torch.device, dtype: torch.dtype) -> None:
        """Compile what would otherwise be compiled at the first call of a shape, in the middle of a capture."""
        for compiler in self.compilers:
            compiler(device, dtype)

    def describe(self) -> list[tuple[str, str, str]]:
        """Rows (function, implementation, reason)."""
        return [(name, _origin(getattr(self, name)), self.reasons.get(name, "")) for name in self.kernel_names()]


def device_named(word: str) -> torch.device:
    """The device that a --device setting names on this machine; auto is a GPU if there is one."""
    if word == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", word):
        raise ConfigError(f"device is {word!r}; allowed: auto, cpu, cuda, cuda:1 and so on (--device)")
    device = torch.device(word)
    if device.type == "cuda" and not torch.cuda.is_available():
        found = f"torch {torch.__version__} finds no GPU here"
        raise ConfigError(f"device is {word}, and {found}; `saccade doctor` says why, or use cpu (--device)")
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise ConfigError(f"device is {word}; GPUs here are 0..{torch.cuda.device_count() - 1} (--device)")
    return device


def kernels_for(device: torch.device | str, dtype: torch.dtype) -> Kernels:
    """Importing flash-attn-4 takes seconds; call this once."""
    device = torch.device(device)
    if device.type == "cpu":
        return Kernels("reference", {}, dict.fromkeys(Kernels.kernel_names(), "the device is a CPU"))
    if device.type != "cuda":
        raise ConfigError(f"there are no kernels for device {device}; allowed: cpu, cuda")
    return _cuda_kernels(torch.cuda.get_device_capability(device), dtype)


def is_hopper(device: torch.device | int) -> bool:
    """Hopper or later."""
    return torch.cuda.get_device_capability(device) >= _HOPPER


def open_device(device: torch.device, dtype: torch.dtype) -> None:
    """The slow start-up that needs no model: initialise the device and import its kernel packages."""
    if device.type == "cuda":
        if device.index is not None:
            torch.cuda.set_device(device)  # events and Triton launches use the current device
        torch.zeros((), device=device)
        kernels_for(device, dtype)


def _cuda_kernels(capability: tuple[int, int], dtype: torch.dtype) -> Kernels:
    """Triton, with faster products and attention if the GPU, dtype and installation allow it."""
    use_private_kernel_cache()
    modules = [importlib.import_module(f"saccade.kernels.{name}") for name in ("fused", "fused_vision")]
    functions = {name: getattr(m, name) for m in modules for name in Kernels.kernel_names() if hasattr(m, name)}
    reasons = dict.fromkeys(Kernels.kernel_names(), "the device is a GPU")
    kernels = _with_products(Kernels("triton", functions, reasons), capability, dtype)
    backends, missing = _attention_backends(capability, dtype)
    chosen = AttentionDispatch(*backends)
    attention = {name: getattr(chosen, name) for name in ("varlen_attention", "paged_attention")}
    reason = missing or "the first that supports a call takes it"
    return replace(
        kernels,
        name="+".join([kernels.name, *(b.name for b in backends[:-1])]),
        functions={**kernels.functions, **attention},
        reasons=kernels.reasons | dict.fromkeys(attention, reason),
    )


def _attention_backends(capability: tuple[int, int], dtype: torch.dtype) -> tuple[list[AttentionBackend], str]:
    """Backends, best first and Triton last; and why better ones are missing."""
    adapters, fused = (importlib.import_module(f"saccade.kernels.{name}") for name in ("adapters", "fused_attention"))
    triton = fused.TritonAttention()
    missing: list[str] = []
    for refusal, load in (
        (adapters.flash_refusal, adapters.load_flash_attention),
        (adapters.varlen_refusal, adapters.load_torch_varlen),
    ):
        found = refusal(capability, dtype) or load()
        if not isinstance(found, str):
            return [found, triton], "; ".join(missing)
        missing.append(found)
    return [triton], "; ".join(missing)


def _with_products(kernels: Kernels, capability: tuple[int, int], dtype: torch.dtype) -> Kernels:
    """quack's tiles were measured on Hopper, in half precision."""
    names = ("linear", "gated_linear", "activated_linear")
    if capability[0] != _HOPPER[0] or dtype not in _HALF:
        met = f"{dtype} on compute capability {capability[0]}.{capability[1]}"
        return replace(
            kernels, reasons=kernels.reasons | dict.fromkeys(names, f"cuBLAS: quack's tiles are not for {met}")
        )
    products = importlib.import_module("saccade.kernels.products").load_products()
    if isinstance(products, str):
        return replace(kernels, reasons=kernels.reasons | dict.fromkeys(names, f"cuBLAS: {products}"))
    return replace(
        kernels,
        name=f"{kernels.name}+quack",
        functions={**kernels.functions, **{name: getattr(products, name) for name in names}},
        compilers=(products.prepare,),
        reasons=kernels.reasons | dict.fromkeys(names, "quack's tiles where they are faster than cuBLAS, by shape"),
    )


def _origin(function: Callable[..., object]) -> str:
    """The function's module, or the name of the object it is a method of."""
    owner = getattr(function, "__self__", None)
    return function.__module__.rpartition(".")[-1] if owner is None else getattr(owner, "name", type(owner).__name__)


@dataclass(frozen=True)
class SamplingKernels(KernelTable):
    """The sampling functions of one device. On a GPU the last dimension of every tensor must be contiguous.

    Penalties keep one int32 tensor, `seen_SV`, with a row per slot of a running request, initially zero. The sign bit
    says that a token is in the prompt, the other bits count its outputs: one load reads both, atomics set both.
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


def sampling_for(device: torch.device | str) -> SamplingKernels:
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"there is no sampling for device {device}; allowed: cpu, cuda")
    if device.type == "cpu":
        return SamplingKernels("reference", {})
    module = importlib.import_module("saccade.kernels.fused_sampling")
    return SamplingKernels("triton", {name: getattr(module, name) for name in SamplingKernels.kernel_names()})

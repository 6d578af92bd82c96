"""Chooses the implementation of each kernel for a device, once; layers receive the result."""

import importlib
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from saccade.config import use_private_kernel_cache
from saccade.errors import ConfigError
from saccade.kernels import reference, reference_sampling, reference_scaled
from saccade.kernels.backends import AttentionBackend, AttentionDispatch
from saccade.kernels.reference_vision import activate
from saccade.kernels.weight import Inputs, Pending, Scaled, Weight, scale_inputs

_HOPPER = (9, 0)
_HALF = (torch.float16, torch.bfloat16)
_FIRST_E4M3 = (8, 9)


@dataclass(frozen=True)
class KernelTable:
    """Kernels by name. A subclass's static methods are plain-torch oracles, and `functions` may replace them.
    Replacements have the oracle's signature, so mypy checks every call."""

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
    """The kernels of one device and dtype. `reasons` says why each implementation was chosen. The methods pick a kernel
    by the layout of the weight, so layers need not know it."""

    linear = staticmethod(reference.linear)
    gated_linear = staticmethod(reference.gated_linear)
    activated_linear = staticmethod(reference.activated_linear)
    rms_norm = staticmethod(reference.rms_norm)
    add_rms_norm = staticmethod(reference.add_rms_norm)
    layer_norm = staticmethod(reference.layer_norm)
    add_layer_norm = staticmethod(reference.add_layer_norm)
    gated_activation = staticmethod(reference.gated_activation)
    newest_tokens = staticmethod(reference.newest_tokens)
    rotary_tables = staticmethod(reference.rotary_tables)
    qk_norm_rotary_store = staticmethod(reference.qk_norm_rotary_store)
    varlen_attention = staticmethod(reference.varlen_attention)
    paged_attention = staticmethod(reference.paged_attention)
    rotate_packed = staticmethod(reference.rotate_packed)
    add_positions = staticmethod(reference.add_positions)
    scatter_rows = staticmethod(reference.scatter_rows)
    place_rows = staticmethod(reference.place_rows)
    grouped_linear = staticmethod(reference_scaled.grouped_linear)
    scale_inputs = staticmethod(scale_inputs)
    scaled_linear = staticmethod(reference_scaled.scaled_linear)
    scaled_grouped_linear = staticmethod(reference_scaled.scaled_grouped_linear)
    scaled_rms_norm = staticmethod(reference_scaled.scaled_rms_norm)
    scaled_layer_norm = staticmethod(reference_scaled.scaled_layer_norm)
    scaled_gated_activation = staticmethod(reference_scaled.scaled_gated_activation)
    scaled_activation = staticmethod(reference_scaled.scaled_activation)
    row_linear = staticmethod(reference_scaled.row_linear)
    row_gated_linear = staticmethod(reference_scaled.row_gated_linear)
    pending_linear = staticmethod(reference_scaled.pending_linear)
    pending_gated_linear = staticmethod(reference_scaled.pending_gated_linear)
    reasons: dict[str, str] = field(default_factory=dict)
    compilers: tuple[Callable[[torch.device, torch.dtype], None], ...] = ()

    def multiply(self, x: Inputs, weight: Weight, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """x weight' + bias, written to `out` if given."""
        if isinstance(x, Scaled):
            return self.scaled_linear(x, weight, bias, out)
        if isinstance(x, Pending):
            return self.pending_linear(x, weight, bias, out)
        if weight.is_plain:
            return self.linear(x, weight.data, bias, out)
        if not weight.needs_scaled(x.shape[0]):
            return self.row_linear(x, weight, bias, out)
        return self.scaled_linear(self.scale_inputs(x, weight), weight, bias, out)

    def multiply_gated(self, x: Inputs, weight: Weight, kind: str, feeds: Weight) -> Inputs:
        """activation(gate) * up, where x weight' is [gate | up], in the form that the weight `feeds` takes."""
        if isinstance(x, Pending) and kind == "silu":
            return self.pending_gated_linear(x, weight)
        if isinstance(x, Tensor) and weight.is_plain and not feeds.needs_scaled(x.shape[0]):
            return self.gated_linear(x, weight.data, kind)
        if isinstance(x, Tensor) and kind == "silu" and not weight.needs_scaled(x.shape[0]) and not weight.is_plain:
            return self.row_gated_linear(x, weight)
        return self.gated_inputs(self.multiply(x, weight), kind, feeds)

    def gated_inputs(self, gate_up: Tensor, kind: str, feeds: Weight) -> Inputs:
        """activation(gate) * up, in the form that the weight `feeds` takes."""
        if feeds.needs_scaled(gate_up.shape[0]):
            return self.scaled_gated_activation(gate_up, kind, feeds)
        return self.gated_activation(gate_up, kind)

    def multiply_activated(self, x: Inputs, weight: Weight, bias: Tensor | None, kind: str, feeds: Weight) -> Inputs:
        """activation(x weight' + bias), in the form that the weight `feeds` takes."""
        if isinstance(x, Tensor) and weight.is_plain and not feeds.needs_scaled(x.shape[0]):
            return self.activated_linear(x, weight.data, bias, kind)
        y = self.multiply(x, weight, bias)
        return self.scaled_activation(y, kind, feeds) if feeds.needs_scaled(y.shape[0]) else activate(y, kind)

    def multiply_grouped(self, x: Inputs, weight: Weight, ends_E: Tensor) -> Tensor:
        """Multiplies each expert's rows with its matrix; the rows of expert e end before row `ends_E[e]`."""
        assert not isinstance(x, Pending), "a pending row can feed only one product, and experts are several"
        if isinstance(x, Tensor) and weight.is_plain:
            return self.grouped_linear(x, weight.data, ends_E)
        scaled = self.scale_inputs(x, weight) if isinstance(x, Tensor) else x
        return self.scaled_grouped_linear(scaled, weight, ends_E)

    def rms_inputs(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, feeds: Weight | None, *, offset: float
    ) -> tuple[Inputs, Tensor]:
        """The norm of `x + residual`, in the form that the weight `feeds` takes, and the sum itself. For a single row
        the norm may be left to the next product, which then also writes the sum."""
        if feeds is not None and feeds.is_plain and x.shape[0] == 1:
            total = x if residual is None else torch.empty_like(x)
            return Pending(x, residual, total, weight, eps, offset), total
        if feeds is not None and feeds.needs_scaled(x.shape[0]):
            return self.scaled_rms_norm(x, residual, weight, eps, feeds, offset=offset)
        if residual is None:
            return self.rms_norm(x, weight, eps, offset=offset), x
        return self.add_rms_norm(x, residual, weight, eps, offset=offset)

    def layer_inputs(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, feeds: Weight | None
    ) -> tuple[Inputs, Tensor]:
        """See `rms_inputs`."""
        if feeds is not None and feeds.needs_scaled(x.shape[0]):
            return self.scaled_layer_norm(x, residual, weight, bias, eps, feeds)
        if residual is None:
            return self.layer_norm(x, weight, bias, eps), x
        return self.add_layer_norm(x, residual, weight, bias, eps)

    def compile(self, device: torch.device, dtype: torch.dtype) -> None:
        """Compiles now what would otherwise compile at the first call of a shape, in the middle of a capture."""
        for compiler in self.compilers:
            compiler(device, dtype)

    def describe(self) -> list[tuple[str, str, str]]:
        """Rows (function, implementation, reason)."""
        return [(name, _origin(getattr(self, name)), self.reasons.get(name, "")) for name in self.kernel_names()]


def device_named(word: str) -> torch.device:
    """The device that a --device setting names on this machine. auto is a GPU if there is one, otherwise the CPU;
    auto:1, as replicas use it, is the second GPU."""
    if re.fullmatch(r"auto(:[0-9]{1,3})?", word):
        word = word.replace("auto", "cuda") if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", word):
        raise ConfigError(f"device is {word!r}; allowed: auto, cpu, cuda, cuda:1 and so on (--device)")
    device = torch.device(word)
    if device.type == "cuda" and not torch.cuda.is_available():
        found = f"torch {torch.__version__} finds no GPU on this machine"
        raise ConfigError(f"device is {word}, but {found}; `saccade doctor` says why, or use cpu (--device)")
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise ConfigError(
            f"device is {word}; this machine has GPUs 0..{torch.cuda.device_count() - 1} "
            f"(--device, --data-parallel-size)"
        )
    return device


def kernels_for(device: torch.device | str, dtype: torch.dtype) -> Kernels:
    """Importing flash-attn-4 takes seconds; call this once."""
    device = torch.device(device)
    if device.type == "cpu":
        return Kernels("reference", {}, dict.fromkeys(Kernels.kernel_names(), "the device is a CPU"))
    if device.type != "cuda":
        raise ConfigError(f"there are no kernels for device {device}; allowed: cpu, cuda")
    return _cuda_kernels(torch.cuda.get_device_capability(device), dtype)


def gpu_for(device: torch.device) -> torch.device | None:
    """The GPU to compile kernels for, given tensors on this device. Meta tensors stand for tensors on the current GPU
    (see `compile_only`)."""
    if device.type == "meta" and torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return device if device.type == "cuda" else None


def is_hopper(device: torch.device | int) -> bool:
    """Hopper or later."""
    return torch.cuda.get_device_capability(device) >= _HOPPER


def require_e4m3(device: torch.device, dtype: torch.dtype) -> None:
    """Raises if e4m3 products do not work on this GPU or with this output dtype."""
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < _FIRST_E4M3:
        needed = ".".join(map(str, _FIRST_E4M3))
        raise ConfigError(
            f"FP8 weights need compute capability {needed} or later; this GPU has {major}.{minor}. Use the bfloat16 "
            f"checkpoint, or leave out --quantization"
        )
    if dtype is not torch.bfloat16:
        raise ConfigError(f"products of FP8 weights are bfloat16 on a GPU, not {dtype}; use bfloat16 (--dtype)")


def as_current(device: torch.device) -> AbstractContextManager[object]:
    """Makes this the current device, which every thread has its own of. Events and Triton launches use it."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def open_device(device: torch.device, dtype: torch.dtype) -> None:
    """Does the slow start-up work that needs no model: initialises the device and imports its kernel packages."""
    if device.type == "cuda":
        if device.index is not None:
            torch.cuda.set_device(device)  # see `as_current`
        torch.zeros((), device=device)
        kernels_for(device, dtype)


def _cuda_kernels(capability: tuple[int, int], dtype: torch.dtype) -> Kernels:
    """Triton kernels, with faster products and attention if the GPU, dtype and installation allow it."""
    use_private_kernel_cache()
    modules = [importlib.import_module(f"saccade.kernels.{name}") for name in ("fused", "fused_vision", "scaled")]
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
    """The backends, best first and Triton last, and why better ones are missing."""
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
    """Adds quack's products on Hopper in half precision, the only case for which its tiles were measured."""
    names = ("linear", "gated_linear", "activated_linear")
    if capability[0] != _HOPPER[0] or dtype not in _HALF:
        case = f"{dtype} on compute capability {capability[0]}.{capability[1]}"
        return replace(
            kernels,
            reasons=kernels.reasons | dict.fromkeys(names, f"cuBLAS: quack's tiles were not measured for {case}"),
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

    Penalties keep one int32 tensor, `seen_SV`, initially zero, with a row for each slot of a running request. The sign
    bit of an entry says that the token is in the prompt; the other bits count its outputs. One load reads both.
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
        raise ConfigError(f"there are no sampling kernels for device {device}; allowed: cpu, cuda")
    if device.type == "cpu":
        return SamplingKernels("reference", {})
    module = importlib.import_module("saccade.kernels.fused_sampling")
    return SamplingKernels("triton", {name: getattr(module, name) for name in SamplingKernels.kernel_names()})

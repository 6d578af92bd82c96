"""Compiles the kernels of passes over meta tensors into the disk caches without running the passes.

Several processes share the work without communicating. Each runs the same passes, so each encounters the same kernels
in the same order and compiles every N-th of them.
"""

import importlib
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from saccade.kernels import adapters, products
from saccade.kernels.adapters import FlashAttention, TorchVarlen
from saccade.kernels.dispatch import kernels_for
from saccade.kernels.products import HopperProducts
from saccade.kernels.scaled import is_torch_product
from saccade.kernels.weight import Scaled, Weight


@dataclass(frozen=True, slots=True)
class Share:
    """One process's share of the kernels: every `count`-th distinct key in order of appearance, starting at `index`."""

    index: int
    count: int
    numbers: dict[Hashable, int] = field(default_factory=dict)

    def has(self, key: Hashable) -> bool:
        return self.numbers.setdefault(key, len(self.numbers)) % self.count == self.index


class CompileOnly:
    """The kernels of a GPU, for passes over meta tensors.

    `share` divides the Triton kernels; `heavy` divides the attention and product kernels of other packages, which take
    longer to compile. Those packages compile on the GPU itself, so they get real tensors of the same shape or smaller.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, share: Share, heavy: Share) -> None:
        self._device, self._dtype, self._share, self._heavy = device, dtype, share, heavy
        self._products: HopperProducts | None = None
        with self._packages_that_launch_nothing():
            kernels = kernels_for(device, dtype)
        functions = dict(kernels.functions)
        if "scaled_linear" in functions:
            functions["scaled_linear"] = _without_product(functions["scaled_linear"])
        self.kernels = replace(kernels, functions=functions)

    @contextmanager
    def _packages_that_launch_nothing(self) -> Iterator[None]:
        """Patches the package loaders, so that kernels loaded in this context do not launch."""
        found = products.load_products, adapters.load_flash_attention, adapters.load_torch_varlen

        def load_products() -> HopperProducts | str:
            loaded = found[0]()
            if isinstance(loaded, str):
                return loaded
            self._products = loaded
            return replace(loaded, plain=_nothing, activated=_nothing)  # shares the set of shapes with `loaded`

        def load_flash_attention() -> FlashAttention | str:
            loaded = found[1]()
            return (
                loaded
                if isinstance(loaded, str)
                else replace(loaded, function=_on_device(loaded.function, self._device))
            )

        def load_torch_varlen() -> TorchVarlen | str:
            loaded = found[2]()
            return (
                loaded
                if isinstance(loaded, str)
                else replace(loaded, function=lambda q, *args, **options: torch.empty_like(q))
            )

        products.load_products = load_products
        adapters.load_flash_attention, adapters.load_torch_varlen = load_flash_attention, load_torch_varlen
        try:
            yield
        finally:
            products.load_products, adapters.load_flash_attention, adapters.load_torch_varlen = found

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Triton and flash-attn-4 compile instead of launching in this context. Products are compiled when it ends."""
        with _triton_compiles_only(self._share), _flash_compiles_only(self._heavy):
            yield
        if self._products is None:
            return
        for kind, tile in self._products.tiles():
            if self._heavy.has((kind, tile)):
                self._products.compile_tile(kind, tile, self._device, self._dtype)


def _nothing(*args: Any, **options: Any) -> None:
    pass


def _without_product(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Skips torch's e4m3 products, which come compiled and do not accept meta tensors."""

    def call(x: Scaled, weight: Weight, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if not is_torch_product(x.data.shape[0], weight):
            return function(x, weight, bias, out)
        shape = (x.data.shape[0], weight.shape[0])
        return torch.empty(shape, dtype=weight.dtype, device=x.data.device) if out is None else out

    return call


def _on_device(function: Callable[..., Any], device: torch.device) -> Callable[..., Tensor]:
    """Calls `function` once per set of shapes, with meta tensors replaced by new tensors on the device."""
    seen: set[Hashable] = set()

    def described(value: Any) -> Hashable:
        return (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value

    def real(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return made if made.is_floating_point() else made.zero_()  # random boundaries could point anywhere

    def call(q: Tensor, *args: Any, **options: Any) -> Tensor:
        key = (described(q), *map(described, args), *((name, described(value)) for name, value in options.items()))
        if key not in seen:
            seen.add(key)
            function(real(q), *map(real, args), **{name: real(value) for name, value in options.items()})
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)

    return call


@contextmanager
def _triton_compiles_only(share: Share) -> Iterator[None]:
    """Makes a Triton launch only compile the kernel and its launcher; the cache hook skips other processes' kernels."""
    triton = importlib.import_module("triton")
    function: Any = importlib.import_module("triton.runtime.jit").JITFunction
    launch, hook = function.run, triton.knobs.runtime.jit_cache_hook

    def is_left_out(*, key: Any, fn: Any, **details: Any) -> bool:
        return not share.has((fn.module, fn.name, str(key)))

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled = launch(self, *args, grid=grid, warmup=True, **options)
        if compiled is not None:
            _ = compiled.run

    function.run, triton.knobs.runtime.jit_cache_hook = run, is_left_out
    try:
        yield
    finally:
        function.run, triton.knobs.runtime.jit_cache_hook = launch, hook


@contextmanager
def _flash_compiles_only(heavy: Share) -> Iterator[None]:
    """flash-attn-4 looks a kernel up in a cache, compiles it if it is missing, then calls the cache entry. The patched
    cache claims to contain other processes' kernels, and its entries do nothing."""
    try:
        cache: Any = importlib.import_module("flash_attn.cute.cache_utils").JITPersistentCache
    except (ImportError, AttributeError, OSError):
        yield
        return
    contains, get = cache.__contains__, cache.__getitem__

    def has(self: Any, key: Any) -> bool:
        return not heavy.has((str(self.cache_path), key)) or contains(self, key)

    cache.__contains__, cache.__getitem__ = has, lambda self, key: _nothing
    try:
        yield
    finally:
        cache.__contains__, cache.__getitem__ = contains, get

"""Cheap repeated launches of Triton kernels."""

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, partial
from types import FunctionType
from typing import Any

import torch

MAX_CACHED = 4096  # launches of a kernel that differ in more than addresses: a few for each number of rows
_ALIGNMENT = 16  # bytes; Triton compiles another kernel for addresses that are no multiples of it


class Current:
    """The current device and its current stream handle, found the way Triton itself finds them."""

    def __init__(self) -> None:
        self.stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    def device(self) -> int:
        """-1 before CUDA is initialised, when no kernel can have been compiled for a device."""
        return torch.cuda.current_device() if torch.cuda.is_initialized() else -1


class Launcher:
    """A decorator for Triton kernels, which are launched as without it: `kernel[grid](*args, **constants)`. Triton
    binds, inspects and hashes all arguments at every launch. Here that happens once per key; later launches run the
    compiled kernel directly, which takes a third of the time. A kernel's pointers come first, and their names end in
    `_ptr`.

    Invariant: launches with equal keys differ in nothing but the addresses of their tensors. The key has everything
    else that Triton chooses a compiled kernel by: device, dtypes, alignment, numbers, constants and options. The stream
    is looked up at every launch. No tensor is kept alive.

    A direct launch that fails because Triton interprets or has another interface fails before it launches anything.
    From then on all launches are ordinary. Triton's profiler hooks see only ordinary launches.
    """

    def __init__(self, kernel: Any, current: Any = None) -> None:
        self.kernel = kernel
        self._current: Any = current or Current()
        self._names: Sequence[str] = getattr(kernel, "arg_names", ())
        self._num_pointers = sum(name.endswith("_ptr") for name in self._names)
        self._cached: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}
        self._can_cache = self._current.stream is not None

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    @cached_property
    def _with_key(self) -> Any:
        settle_key(self.kernel)
        return self.kernel

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        if not self._can_cache:
            self._with_key[grid](*args, **constants)
            return
        tensors, numbers = args[: self._num_pointers], args[self._num_pointers :]
        addresses = [tensor.data_ptr() for tensor in tensors]
        device = self._current.device()
        dtypes, misaligned = [tensor.dtype for tensor in tensors], [at % _ALIGNMENT for at in addresses]
        key = (device, *numbers, *dtypes, *misaligned, *constants, *constants.values())
        cached = self._cached.get(key)
        if cached is None or not self._launch_directly(grid, device, addresses, *cached):
            self._remember(key, self._with_key[grid](*args, **constants), numbers, constants)

    def _launch_directly(
        self, grid: tuple[int, ...], device: int, addresses: Sequence[int], compiled: Any, others: tuple[Any, ...]
    ) -> bool:
        """Makes the call that Triton makes once it has processed the arguments. The three None are its profiler's."""
        place = (*(*grid, 1, 1)[:3], self._current.stream(device))
        try:
            compiled.run(*place, compiled.function, compiled.packed_metadata, None, None, None, *addresses, *others)
        except (AttributeError, TypeError):
            self._can_cache = False
            self._cached.clear()
        return self._can_cache

    def _remember(self, key: Hashable, compiled: Any, numbers: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """A compiled kernel takes all parameters by position, constants included, and addresses as integers."""
        names = self._names[self._num_pointers + len(numbers) :]
        self._can_cache = self._can_cache and compiled is not None and bool(names) and constants.keys() >= set(names)
        if not self._can_cache:
            return
        if len(self._cached) >= MAX_CACHED:
            self._cached.clear()
        self._cached[key] = compiled, (*numbers, *(constants[name] for name in names))


def settle_key(kernel: Any) -> None:
    """Makes Triton hash a kernel's helpers before the kernel. Triton 3.6 leaves a helper's constants out of the key of
    the kernel that mentions it first. Keys, by which kernels are found on disk, would depend on the order of launches,
    and a worker would compile again what the compile processes have compiled."""
    function = getattr(kernel, "fn", None)
    if not isinstance(function, FunctionType):
        return
    for name in function.__code__.co_names:
        helper = function.__globals__.get(name)
        if helper is not kernel and isinstance(helper, type(kernel)):
            settle_key(helper)
    getattr(kernel, "cache_key", None)

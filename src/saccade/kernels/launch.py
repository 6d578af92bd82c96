"""Cheap repeated launches of Triton kernels with the same arguments."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

MAX_CACHED = 16  # argument lists per kernel; static buffers need one or two


class Current:
    """The current device and its current stream handle, found the way Triton itself finds them."""

    def __init__(self) -> None:
        self.stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    def device(self) -> int:
        """-1 before CUDA is initialised, when no kernel can have been compiled for a device."""
        return torch.cuda.current_device() if torch.cuda.is_initialized() else -1


class CachedLaunch:
    """A Triton kernel that skips Python overhead. `kernel[grid](*args, **constants)` binds, inspects and hashes all
    arguments at every launch. Here that happens once per `key`; later launches run the compiled kernel directly.

    Invariant: equal keys mean equal arguments (values, and the address, dtype and strides of every tensor). The current
    device is part of the key. So everything that Triton specialised the kernel on still holds. The stream is looked up
    at every launch. Only addresses are stored, so no tensor is kept alive.

    A direct launch that fails because Triton interprets or has another interface fails before it launches anything.
    From then on all launches are ordinary. Triton's profiler hooks see only ordinary launches.
    """

    def __init__(self, kernel: Any, current: Any = None) -> None:
        self._kernel = kernel
        self._current: Any = current or Current()
        self._cached: dict[Hashable, tuple[Any, list[Any]]] = {}
        self._can_cache = self._current.stream is not None

    def __call__(self, key: Hashable, grid: tuple[int, int], *args: Any, **constants: Any) -> None:
        device = self._current.device()
        cached = self._cached.get((device, key))
        if cached is None or not self._launch_directly(grid, device, *cached):
            self._remember((device, key), self._kernel[grid](*args, **constants), args, constants)

    def _launch_directly(self, grid: tuple[int, int], device: int, compiled: Any, bound: list[Any]) -> bool:
        """Makes the call that Triton makes once it has processed the arguments. The three None are its profiler's."""
        try:
            stream = self._current.stream(device)
            compiled.run(*grid, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *bound)
        except (AttributeError, TypeError):
            self._can_cache = False
            self._cached.clear()
        return self._can_cache

    def _remember(self, key: Hashable, compiled: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """A compiled kernel takes all parameters by position, constants included, and addresses as integers."""
        names = getattr(self._kernel, "arg_names", ())[len(args) :]
        self._can_cache = self._can_cache and compiled is not None and bool(names) and constants.keys() >= set(names)
        if not self._can_cache:
            return
        if len(self._cached) >= MAX_CACHED:
            self._cached.clear()
        addresses = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args]
        self._cached[key] = compiled, [*addresses, *(constants[name] for name in names)]

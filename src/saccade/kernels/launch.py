"""Triton kernels that are launched again and again with the same arguments."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

MAX_KEPT = 16  # lists of arguments; static buffers need one or two, others come and go


class Current:
    """The current device, and its current stream as the driver knows it; what Triton itself asks torch for."""

    def __init__(self) -> None:
        self.stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    def device(self) -> int:
        """Where CUDA was not started yet, nothing can have been compiled for any device."""
        return torch.cuda.current_device() if torch.cuda.is_initialized() else -1


class KeptLaunch:
    """A Triton kernel. `kernel[grid](*args, **constants)` binds, inspects and hashes all arguments in Python at every
    launch; here that is done once for each `key`, and what it compiled is launched directly from then on.

    Invariant: the caller gives equal keys to equal arguments only: the same address, type and stride of every tensor,
    the same values. The device that is current is added to it. So all that Triton specialised a kernel on still holds,
    whatever that is, and its function is one of the current device. The stream is looked up at every launch. No tensor
    is kept alive: only its address is.

    Whether direct launches are possible is found out at the first one. They are refused before anything is launched,
    so where Triton has another interface, or interprets, every launch is an ordinary one from then on. The hooks of
    Triton's own profiler see ordinary launches only.
    """

    def __init__(self, kernel: Any, current: Any = None) -> None:
        self._kernel = kernel
        self._current: Any = current or Current()
        self._kept: dict[Hashable, tuple[Any, list[Any]]] = {}
        self._can_keep = self._current.stream is not None

    def __call__(self, key: Hashable, grid: tuple[int, int], *args: Any, **constants: Any) -> None:
        device = self._current.device()
        kept = self._kept.get((device, key))
        if kept is None or not self._launch_directly(grid, device, *kept):
            self._keep((device, key), self._kernel[grid](*args, **constants), args, constants)

    def _launch_directly(self, grid: tuple[int, int], device: int, compiled: Any, bound: list[Any]) -> bool:
        """As Triton does it behind its own look at the arguments; the three None are for its profiler."""
        try:
            stream = self._current.stream(device)
            compiled.run(*grid, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *bound)
        except (AttributeError, TypeError):
            self._can_keep = False
            self._kept.clear()
        return self._can_keep

    def _keep(self, key: Hashable, compiled: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """A compiled kernel takes every parameter by position, constants among them; addresses as integers."""
        names = getattr(self._kernel, "arg_names", ())[len(args) :]
        self._can_keep = self._can_keep and compiled is not None and bool(names) and constants.keys() >= set(names)
        if not self._can_keep:
            return
        if len(self._kept) >= MAX_KEPT:
            self._kept.clear()
        addresses = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args]
        self._kept[key] = compiled, [*addresses, *(constants[name] for name in names)]

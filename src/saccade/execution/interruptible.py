"""Stops an eager run between two operations."""

from collections.abc import Callable
from typing import Any

import torch

from saccade.graphs.operation_mode import OperationMode

ShouldStop = Callable[[], bool]


class CheckStoppedError(Exception):
    """A check was stopped because a command is waiting."""


class Interruptible(OperationMode):
    """Checks `should_stop` before each operation. The device is at most one operation behind, so it is soon free."""

    def __init__(self, should_stop: ShouldStop, device: torch.device) -> None:
        super().__init__()
        self._should_stop = should_stop
        self._events = [torch.cuda.Event() for _ in range(2)] if device.type == "cuda" else []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._should_stop():
            raise CheckStoppedError
        result = func(*args, **(kwargs or {}))
        if self._events:
            self._events[0].record()
            self._events.reverse()
            self._events[0].synchronize()
        return result

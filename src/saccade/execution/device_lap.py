"""How long passes take, without ever waiting for them."""

from dataclasses import dataclass
from time import monotonic
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class DeviceLap:
    """A pass from `begin` to `end`, both from `now`. On a GPU it is timed by the device's clock, which excludes time
    queued behind earlier steps. On a CPU passes run synchronously."""

    begin: Any
    end: Any

    def seconds(self) -> float | None:
        """None while it runs."""
        if isinstance(self.end, float):
            return self.end - float(self.begin)
        return float(self.begin.elapsed_time(self.end)) / 1000 if self.end.query() else None


def now(device: torch.device) -> Any:
    """The time when the current stream finishes its work so far; does not wait."""
    if device.type != "cuda":
        return monotonic()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event

"""How long vision passes take, known without ever waiting for them."""

from dataclasses import dataclass
from time import monotonic
from typing import Any

import torch


@dataclass(slots=True)
class DeviceLap:
    """The vision passes of one order, from the first one's begin to the last one's end. On a GPU the device's own clock
    says: time behind the passes of earlier steps is not in it. On a CPU passes run where they are launched."""

    begin: Any
    end: Any = None

    @classmethod
    def start(cls, device: torch.device) -> "DeviceLap":
        return cls(_now(device))

    def stop(self, device: torch.device) -> None:
        """Behind the launch of the passes, on their stream; it waits for nothing."""
        self.end = _now(device)

    def seconds(self) -> float | None:
        """None while they run, or where they were not launched."""
        if self.end is None:
            return None
        if isinstance(self.end, float):
            return self.end - float(self.begin)
        return float(self.begin.elapsed_time(self.end)) / 1000 if self.end.query() else None


def _now(device: torch.device) -> Any:
    if device.type != "cuda":
        return monotonic()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event

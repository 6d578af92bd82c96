"""How long passes take, measured without waiting for them."""

from dataclasses import dataclass
from time import monotonic
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class DeviceLap:
    """The time of a pass from `begin` to `end`, which both come from `now`. A GPU's own clock excludes the time that
    the pass is queued behind earlier steps. On a CPU passes run synchronously."""

    begin: Any
    end: Any

    def seconds(self) -> float | None:
        """None while the pass runs."""
        if isinstance(self.end, float):
            return self.end - float(self.begin)
        return float(self.begin.elapsed_time(self.end)) / 1000 if self.end.query() else None


def now(device: torch.device) -> Any:
    """The time at which the current stream will have finished its work so far. Does not wait."""
    if device.type != "cuda":
        return monotonic()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event

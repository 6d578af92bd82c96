"""How long passes take, measured without waiting for them: by the device's clock on a GPU, by the host's elsewhere."""

from dataclasses import dataclass
from time import monotonic
from typing import Any

import torch
from msgspec.structs import replace

from saccade.choice.key import Decision
from saccade.scheduling.trace_log import Newest
from saccade.wire.trace_records import MAX_PASSES, TracedPass


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


class PassTimer:
    """Keeps the newest passes. On a GPU, `_anchor` relates the device's clock to the host's, which takes one wait."""

    def __init__(self, device: torch.device) -> None:
        self._passes: Newest[tuple[DeviceLap, TracedPass]] = Newest(MAX_PASSES)  # without their times
        self._anchor: tuple[float, Any] | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._anchor = monotonic(), now(device)

    def add(self, lap: DeviceLap, phase: str, decision: Decision, step: int, rows: int) -> None:
        """Adds a launched pass, or a part of one. It may still be running."""
        capacity = decision.key.capacity if decision.key is not None else decision.padded_to
        # Vision passes count their rows in units, all others in tokens.
        room = rows if capacity is None else capacity["units" if phase == "vision" else "tokens"]
        key = str(decision.key or "")
        self._passes.add((lap, TracedPass(phase, step, 0.0, 0.0, key, decision.why, rows, room)))

    def close(self) -> tuple[list[TracedPass], int]:
        """Returns the passes that have ended, in launch order, and how many were dropped."""
        ended = [(lap, one) for lap, one in self._passes.items if lap.seconds() is not None]
        found = [replace(one, begin=self._time(lap.begin), end=self._time(lap.end)) for lap, one in ended]
        return found, self._passes.num_dropped

    def _time(self, mark: Any) -> float:
        if self._anchor is None:
            return float(mark)
        host_s, event = self._anchor
        return host_s + float(event.elapsed_time(mark)) / 1000

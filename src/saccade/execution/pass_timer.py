"""How long passes take, measured without waiting for them: by the device's clock on a GPU, by the host's elsewhere."""

from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple

import torch

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


class _Ran(NamedTuple):
    phase: str
    step: int
    decision: Decision
    rows: int
    room: int


class PassTimer:
    """Keeps the newest passes. On a GPU, `_anchor` relates the device's clock to the host's, which takes one wait."""

    def __init__(self, device: torch.device) -> None:
        self._passes: Newest[tuple[DeviceLap, _Ran]] = Newest(MAX_PASSES)
        self._anchor: tuple[float, Any] | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._anchor = monotonic(), now(device)

    def add(self, lap: DeviceLap, phase: str, decision: Decision, step: int, rows: int) -> None:
        """Adds a launched pass, or a part of one. It may still be running."""
        capacity = decision.key.capacity if decision.key is not None else decision.padded_to
        # Vision passes count their rows in units, all others in tokens.
        room = rows if capacity is None else capacity["units" if phase == "vision" else "tokens"]
        self._passes.add((lap, _Ran(phase, step, decision, rows, room)))

    def close(self) -> tuple[list[TracedPass], int]:
        """Returns the passes that have ended, in launch order, and how many were dropped."""
        found = []
        for lap, ran in self._passes.items:
            if lap.seconds() is not None:
                found.append(_traced(ran, self._time(lap.begin), self._time(lap.end)))
        return found, self._passes.num_dropped

    def _time(self, mark: Any) -> float:
        if self._anchor is None:
            return float(mark)
        host_s, event = self._anchor
        return host_s + float(event.elapsed_time(mark)) / 1000


def _traced(ran: _Ran, begin: float, end: float) -> TracedPass:
    key = str(ran.decision.key or "")
    return TracedPass(ran.phase, ran.step, begin, end, key, ran.decision.why, ran.rows, ran.room)

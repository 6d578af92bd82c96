"""How long vision passes take, known without ever waiting for them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from saccade.execution.encoder import Encoder


@dataclass(slots=True)
class Lap:
    """The vision passes of one step: two events of the stream they run on, or two times of the host's clock."""

    begin: Any
    end: Any = None

    def seconds(self) -> float | None:
        """None while they run, or where the step was not launched."""
        if self.end is None:
            return None
        if isinstance(self.end, float):
            return self.end - float(self.begin)
        return float(self.begin.elapsed_time(self.end)) / 1000 if self.end.query() else None


class Stopwatch:
    """On a GPU a lap lasts from the first pass of a step to the last one's end, as the device's own clock has it: time
    behind the passes of earlier steps is not in it. On a CPU a step runs in one piece, and so a lap is all of it."""

    def __init__(self, encoder: Encoder | None, device: torch.device, clock: Callable[[], float]) -> None:
        self._beside = encoder.beside if encoder is not None and device.type == "cuda" else None
        self._clock = clock

    def start(self) -> Lap:
        return Lap(self._now())

    def stop(self, lap: Lap) -> None:
        """Behind the launch of the passes; it waits for nothing."""
        lap.end = self._now()

    def _now(self) -> Any:
        if self._beside is None:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        with self._beside.work():
            event.record()
        return event

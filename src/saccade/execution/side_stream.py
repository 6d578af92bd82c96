"""A stream beside the one for language steps, and how long its passes take, without ever waiting for them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any

import torch


class SideStream:
    """Runs work in order on its own stream; without CUDA, in order with everything else. `wait` makes the current
    stream wait for all work so far; after `join`, the next work waits for all that the current stream was given. The
    caller must ensure that concurrent work does not conflict."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._done = torch.cuda.Event() if self._stream is not None else None
        self._must_join = True  # everything built at start-up was built on another stream

    @contextmanager
    def work(self) -> Iterator[None]:
        if self._stream is None or self._done is None:
            yield
            return
        if self._must_join:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            self._must_join = False
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._done.record(self._stream)

    def wait(self) -> None:
        if self._stream is not None and self._done is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._done)

    def join(self) -> None:
        self._must_join = True


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

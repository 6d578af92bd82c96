"""A stream beside the one that language steps run on."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """Work in order on a stream of its own; where there are no streams, in order with everything else.

    What it may touch while others run is the caller's to see to. The orders it gives: `wait` lets the current stream
    wait for all work so far; after `join` the next work waits for all that the current stream has been given.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._done = torch.cuda.Event() if self._stream is not None else None
        self._must_join = True  # what was made at the start was made on another stream

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

"""A lane records graphs that share one memory pool, and therefore run one after another: one user at a time."""

import gc
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from saccade.errors import GraphError
from saccade.graphs.cuda_nodes import CudaPiece
from saccade.graphs.nodes import Recording
from saccade.graphs.recorded import Range, RecordedLane

# torch keeps allocations up to this size apart. Larger ones need no reserve, because they fit where a larger one was.
SMALL_BYTES = 2**20
NUM_SMALL = 16  # small temporaries alive at once in a body
_RULE = (
    "a graph has one set of buffers: run one batch at a time, or give each thread a runner with its own arena and lane"
)


class CudaLane:
    """CUDA graphs that share one pool. Captures and replays must follow each other on one stream at a time."""

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.RLock()  # held while a thread runs or captures one of its graphs
        self.num_uses = 0  # a batch that is replayed in parts notices others in between
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._first: torch.cuda.CUDAGraph | None = None  # kept alive, because a pool is freed with its last graph
        self._keeps_nodes = False

    @property
    def nbytes(self) -> int:
        """Memory that torch has reserved on the device. Its growth during a capture is what the graph added."""
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)  # `memory_reserved` sorts all of them first
        return int(stats["reserved_bytes"]["all"]["current"])

    @contextmanager
    def session(self) -> Iterator[None]:
        """Warm-ups and captures run inside a session."""
        # Garbage collection could free CUDA memory or events, which is not allowed during a capture.
        was_enabled = gc.isenabled()
        gc.disable()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            if was_enabled:
                gc.enable()

    def reserve_small(self) -> None:
        """Make the pool keep memory for small temporaries, by capturing many at once, so that captures while serving
        allocate none."""
        with torch.no_grad(), self.session():
            self.begin()
            try:
                held = [torch.empty(SMALL_BYTES, dtype=torch.uint8, device=self._device) for _ in range(NUM_SMALL)]
                held[0].zero_()
            except BaseException:
                self.abandon()
                raise
            self.end()

    @contextmanager
    def keeping_nodes(self) -> Iterator[None]:
        """Pieces recorded in this context can list their nodes. They are for reading, not for replay."""
        self._keeps_nodes = True
        try:
            yield
        finally:
            self._keeps_nodes = False

    def memory(self) -> tuple[list[Range], list[Range]]:
        """The address ranges of the lane's pool, which holds temporaries, and of all memory that torch holds on the
        device."""
        segments = torch.cuda.memory_snapshot()
        pool = [_range(each) for each in segments if tuple(each["segment_pool_id"]) == self._pool]
        return pool, [_range(each) for each in segments]

    def begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph(keep_graph=self._keeps_nodes)
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Recording | None:
        """Finish the piece; None if nothing was recorded."""
        graph, self._graph = self._graph, None
        assert graph is not None, "end() without begin()"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            graph.capture_end()
        is_empty = any("empty" in str(warning.message) for warning in caught)
        self._first = self._first or graph
        return None if is_empty else CudaPiece(graph)

    def abandon(self) -> None:
        """Drop a piece whose recording failed."""
        graph, self._graph = self._graph, None
        if graph is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with suppress(RuntimeError):  # report the error that broke the capture instead
                    graph.capture_end()


def _range(segment: dict[str, Any]) -> Range:
    return segment["address"], segment["address"] + segment["total_size"]


Lane = CudaLane | RecordedLane


def lane_for(device: torch.device) -> Lane:
    return CudaLane(device) if device.type == "cuda" else RecordedLane()


class OneUser:
    """Guards the lane and the buffers of a phase. A thread that holds the lane may run other phases of it, but not the
    same phase again from the consumer of its outputs. A second user is refused, not queued, because it would find the
    buffers changed."""

    def __init__(self, phase: str, lane: Lane) -> None:
        self._phase, self._lane, self._buffers = phase, lane, threading.Lock()

    def __enter__(self) -> None:
        if not self._lane.lock.acquire(blocking=False):
            raise GraphError(f"{self._phase} shares memory with a pass that runs in another thread; {_RULE}")
        if not self._buffers.acquire(blocking=False):
            self._lane.lock.release()
            raise GraphError(f"{self._phase} was entered again by the consumer of its own outputs; {_RULE}")
        self._lane.num_uses += 1

    def __exit__(self, *error: object) -> None:
        self._buffers.release()
        self._lane.lock.release()

"""Captures a body: warms it up, records it, keeps the memory it touches alive, and checks addresses at every replay."""

from collections.abc import Mapping, Sequence
from time import perf_counter

import torch
from torch import Tensor

from saccade.choice.key import GraphKey
from saccade.config import Mode
from saccade.errors import AddressError
from saccade.graphs.arena import Arena, HostArray
from saccade.graphs.frame import Body, Frame, run_body
from saccade.graphs.lane import Lane
from saccade.graphs.nodes import Recording
from saccade.graphs.piecewise import Tape
from saccade.graphs.watched import Watched


class CapturedGraph:
    """Pieces to replay and calls to make, in order. Keeps alive all memory that they touch. `ends` divides them into
    parts that can be replayed one after the other."""

    def __init__(
        self,
        key: GraphKey,
        steps: Sequence[Recording],
        frame: Frame,
        state: Mapping[str, Tensor],
        ends: Sequence[int] = (),
    ) -> None:
        self.key = key
        self.frame = frame
        self.capture_s = 0.0
        self.nbytes = 0
        self.num_replays = 0
        self.steps = tuple(steps)
        self.num_parts = 1 + len(ends)
        self._starts = (0, *ends, None)
        self._keep_alive = tuple(tensor.untyped_storage() for tensor in state.values())
        self._arena = frame.arena
        self._state = Watched.of(state)
        self._pointers = self._arena.pointers()
        self._marks = self._state.marks()

    def replay(self, first: int = 0, end: int | None = None) -> None:
        """Run the graph, or its parts `first` to `end`, on the current content of its buffers. Raises if a buffer or
        any state has moved since the capture. Buffers are checked before the launch. State (weights, caches) is checked
        after it, while the device works, because it has many tensors: the graph only touches memory that it keeps
        alive, and if this raises, nobody sees the results."""
        end = self.num_parts if end is None else end
        if self._arena.pointers() != self._pointers:
            self._refuse_moved()
        for step in self.steps[self._starts[first] : self._starts[end]]:
            step()
        if self._state.marks() != self._marks:
            self._refuse_moved()
        self.num_replays += end == self.num_parts

    def moved(self) -> list[str]:
        """Everything that has moved or been replaced since the capture, a sentence each."""
        then = zip(self._arena.addresses().items(), self._pointers, strict=True)
        buffers = [f"{name!r} was at {was:#x} and is now at {now:#x}" for (name, now), was in then if now != was]
        return buffers + self._state.changes(self._marks)

    def _refuse_moved(self) -> None:
        first = next(iter(self.moved()), "a buffer moved")
        raise AddressError(
            f"graph [{self.key}] no longer matches what it was captured on: {first}; static buffers, weights and "
            "modules must not be replaced after a capture: capture again"
        )


def capture(
    body: Body,
    key: GraphKey,
    arena: Arena,
    lane: Lane,
    *,
    state: Mapping[str, Tensor],
    structure: Mapping[str, HostArray] | None = None,
    is_warm: bool = False,
) -> CapturedGraph:
    """Capture a body on the arena's buffers, which must hold a batch that fits the key. `state` names the tensors
    outside the arena that the body touches (weights, caches). `structure` is for exact graphs, whose key has its
    digest. `is_warm` skips the warm-up: the body has just run at this key."""
    assert (structure is not None) == bool(key.digest), f"structure and digest go together: {key}"
    started = perf_counter()
    tape = Tape(lane, arena, state)
    with torch.no_grad(), lane.session():
        if not is_warm:  # nothing can be compiled, autotuned or loaded during a capture
            run_body(body, Frame(arena, key.capacity, structure, is_warmup=True))
        held_before = lane.nbytes
        frame = Frame(arena, key.capacity, structure, tape if key.mode is Mode.PIECEWISE else None, cut=tape.cut)
        tape.record(body, frame)
    graph = CapturedGraph(key, tape.steps, frame, state, tape.ends)
    graph.nbytes = max(0, lane.nbytes - held_before)
    graph.capture_s = perf_counter() - started
    return graph

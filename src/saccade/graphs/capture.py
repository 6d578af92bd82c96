"""Capture: warm a body up, record it, keep what it reads and writes alive, and check addresses on every replay."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from saccade.config import Mode
from saccade.errors import AddressError
from saccade.graphs.arena import Arena, Array
from saccade.graphs.frame import Body, Frame, run_body
from saccade.graphs.key import GraphKey
from saccade.graphs.lane import Lane
from saccade.graphs.piecewise import Tape


class Watched(Mapping[str, Tensor]):
    """Tensors under their names, read anew at every look from where they live (the mapping, such as the attributes of
    an object, and the name they have there): a replaced one is noticed."""

    def __init__(self, homes: Mapping[str, tuple[Mapping[str, Any], str]]) -> None:
        self._homes = dict(homes)
        self._places = tuple(self._homes.values())

    @classmethod
    def of_module(cls, module: nn.Module) -> "Watched":
        """Its parameters and buffers."""
        homes: dict[str, tuple[Mapping[str, Any], str]] = {}
        for prefix, part in module.named_modules():
            for home in (part._parameters, part._buffers):
                for name, tensor in home.items():
                    if tensor is not None:
                        homes[f"{prefix}.{name}".lstrip(".")] = (home, name)
        return cls(homes)

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> "Watched":
        """The values of a mapping."""
        return state if isinstance(state, Watched) else cls({name: (state, name) for name in state})

    def pointers(self) -> list[int]:
        """Where all of them are now."""
        try:
            return [home[name].data_ptr() for home, name in self._places]
        except (AttributeError, KeyError):
            return [tensor.data_ptr() for tensor in self.values()]  # which says who is gone

    def __or__(self, other: Mapping[str, Tensor]) -> "Watched":
        return Watched({**self._homes, **Watched.of(other)._homes})

    def __getitem__(self, name: str) -> Tensor:
        home, key = self._homes[name]
        tensor: Tensor | None = home.get(key)
        if tensor is None:
            raise AddressError(f"{name!r} is gone; a captured graph reads it")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)


class CapturedGraph:
    """Pieces to replay and calls to make, in order, with all they touch kept alive."""

    def __init__(
        self, key: GraphKey, steps: Sequence[Callable[[], None]], frame: Frame, state: Mapping[str, Tensor]
    ) -> None:
        self.key = key
        self.frame = frame
        self.capture_s = 0.0
        self.nbytes = 0
        self.num_replays = 0
        self._steps = tuple(steps)
        self._keep_alive = tuple(state.values())
        self._arena = frame.arena
        self._state = Watched.of(state)
        self._pointers = self._arena.pointers()
        self._state_pointers = self._state.pointers()

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    def replay(self) -> None:
        """Run the graph on what its buffers hold now. Refused if any of them has moved since the capture.

        Weights and caches are many, and all that was captured is kept alive: they are looked at while the device is at
        work. If one has moved, nobody gets to see what the graph made of the old one.
        """
        if self._arena.pointers() != self._pointers:
            self._refuse_moved()
        for step in self._steps:
            step()
        if self._state.pointers() != self._state_pointers:
            self._refuse_moved()
        self.num_replays += 1

    def _refuse_moved(self) -> None:
        names = [*self._arena.addresses(), *self._state]
        before = [*self._pointers, *self._state_pointers]
        after = [*self._arena.pointers(), *self._state.pointers()]
        for name, captured, now in zip(names, before, after, strict=False):
            if captured != now:
                raise AddressError(
                    f"{name!r} was at {captured:#x} when graph [{self.key}] was captured and is at {now:#x} now; "
                    "static buffers are allocated once and weights stay in place: capture again after moving them"
                )
        raise AddressError(f"graph [{self.key}] was captured with {len(before)} buffers; now there are {len(names)}")


def capture(
    body: Body,
    key: GraphKey,
    arena: Arena,
    lane: Lane,
    *,
    state: Mapping[str, Tensor],
    structure: Mapping[str, Array] | None = None,
    is_warm: bool = False,
) -> CapturedGraph:
    """Capture a body over the arena's buffers, which must hold a batch that fits the key.

    `state` names the tensors outside the arena that the body reads or writes (weights, caches). `structure` is
    given for an exact graph: then the key holds its digest. `is_warm` says that the body has just run at this key.
    """
    assert (structure is not None) == bool(key.digest), f"structure and digest go together: {key}"
    started = perf_counter()
    tape = Tape(lane, arena, state)
    with torch.no_grad(), lane.session():
        if not is_warm:  # compiles, autotunes, loads: a capture can do none of it
            run_body(body, Frame(arena, key.capacity, structure, is_sketch=True))
        held_before = lane.nbytes
        frame = Frame(arena, key.capacity, structure, tape if key.mode is Mode.PIECEWISE else None)
        tape.record(body, frame)
    graph = CapturedGraph(key, tape.steps, frame, state)
    graph.nbytes = max(0, lane.nbytes - held_before)
    graph.capture_s = perf_counter() - started
    return graph

"""Piecewise graphs without a compiler: a call marked as outside ends one piece, runs, and starts the next. A cut ends
one piece, too, and with it a part of the graph, after which a replay may stop and go on later."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from saccade.errors import CaptureError
from saccade.graphs.arena import Arena
from saccade.graphs.frame import Body, Frame, call_name, run_body, store
from saccade.graphs.lane import Lane
from saccade.graphs.nodes import Node, Recording, describe


@dataclass(frozen=True, slots=True)
class OutsideCall:
    """A call between two pieces, made at every replay on the same bridge buffers."""

    fn: Callable[..., Tensor]
    args: tuple[Any, ...]
    bridged: Mapping[str, Tensor]
    into: Tensor

    def __call__(self) -> None:
        store(self.into, self.fn(*self.args, **self.bridged), f"the result of {call_name(self.fn)}")

    def nodes(self) -> list[Node]:
        return [describe(f"call {call_name(self.fn)}", {"args": self.args, **self.bridged, "into": self.into})]


class Tape:
    """Records a body as pieces and the calls between them."""

    def __init__(self, lane: Lane, arena: Arena, state: Mapping[str, Tensor]) -> None:
        self.steps: list[Recording] = []
        self.ends: list[int] = []  # of all parts but the last, as numbers of steps
        self._lane = lane
        self._arena = arena
        self._state = state
        self._frame: Frame | None = None

    def record(self, body: Body, frame: Frame) -> None:
        self._frame = frame
        self._lane.begin()
        try:
            run_body(body, frame)
        except RuntimeError as error:
            self._lane.abandon()
            raise CaptureError(f"the body cannot be captured: {error}") from error
        except BaseException:
            self._lane.abandon()
            raise
        self._end_piece()

    def outside(
        self, fn: Callable[..., Tensor], args: tuple[Any, ...], bridged: Mapping[str, Tensor], into: Tensor
    ) -> Tensor:
        assert self._frame is not None
        self._check_static(fn, args)
        for name, tensor in bridged.items():
            store(self._frame[name], tensor, f"argument {name!r} of {call_name(fn)}")
        crossing = {name: self._frame[name] for name in bridged}
        step = OutsideCall(fn, args, crossing, into)
        self._end_piece()
        step()
        self.steps.append(step)
        self._lane.begin()
        return into

    def cut(self) -> None:
        """Ends a part. What later parts need of it stays where it is, in the pool of the lane, whose graphs must not be
        replayed meanwhile."""
        self._end_piece()
        self.ends.append(len(self.steps))
        self._lane.begin()

    def _end_piece(self) -> None:
        piece = self._lane.end()
        if piece is not None:
            self.steps.append(piece)

    def _check_static(self, fn: Callable[..., Tensor], args: tuple[Any, ...]) -> None:
        """Refuse temporaries: they belong to the pool, which may reuse their memory before the call reads it."""
        for position, value in enumerate(args):
            if not isinstance(value, Tensor) or self._arena.owns(value):
                continue
            if value.untyped_storage().data_ptr() not in self._state_addresses:
                raise CaptureError(
                    f"argument {position} of {call_name(fn)}, shape {tuple(value.shape)}, is neither a static buffer "
                    "nor declared state; pass it by the name of a bridge buffer"
                )

    @cached_property
    def _state_addresses(self) -> set[int]:
        return {tensor.untyped_storage().data_ptr() for tensor in self._state.values()}

"""The argument of a body. The same body runs eagerly, as one graph, and in pieces: only its frame differs."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from saccade.choice.key import Capacity
from saccade.errors import GraphError
from saccade.graphs.arena import Arena, HostArray
from saccade.graphs.buffers import DummySegment, Role

Body = Callable[["Frame"], Mapping[str, Tensor] | None]


class Splitter(Protocol):
    """Ends a captured piece, makes a call, begins the next piece."""

    def outside(
        self, fn: Callable[..., Tensor], args: tuple[Any, ...], bridged: Mapping[str, Tensor], into: Tensor
    ) -> Tensor: ...


class Frame(Mapping[str, Tensor]):
    """The static buffers at one capacity, by name. `structure` has the boundaries as host values, in exact graphs and
    unpadded eager runs only. Elsewhere the key does not cover them and they are data: a body that asks for their host
    values is refused, so that it cannot freeze them. A warm-up run only compiles and loads kernels, and its results are
    not used: the body may skip what launches no new kernel, such as a layer like the one before it. The body calls
    `cut` where a replay may stop and go on later; elsewhere it does nothing."""

    def __init__(
        self,
        arena: Arena,
        capacity: Mapping[str, int],
        structure: Mapping[str, HostArray] | None = None,
        splitter: Splitter | None = None,
        *,
        cut: Callable[[], None] = lambda: None,
        is_warmup: bool = False,
    ) -> None:
        self.arena = arena
        self.is_warmup = is_warmup
        self.cut = cut
        self.capacity = Capacity.of(capacity)
        self._views = arena.views(capacity)
        self._structure = structure
        self._splitter = splitter

    def __getitem__(self, name: str) -> Tensor:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def structure(self, name: str) -> HostArray:
        """The boundaries of a batch as host integers."""
        if self._structure is None:
            raise GraphError(
                f"{name!r} is data in a capacity graph, whose key does not cover it: read its buffer, not host values"
            )
        return self._structure[name]

    def longest(self, name: str) -> int:
        """A bound on segment lengths: the longest segment if the key covers it, else the declared limit or all rows."""
        if self._structure is not None:
            return int(np.diff(self._structure[name]).max(initial=0))
        padding = self.arena.buffers[name].padding
        assert isinstance(padding, DummySegment), f"{name} holds no boundaries"
        return padding.longest or self.capacity[padding.rows]

    def outside(self, fn: Callable[..., Tensor], /, *args: Any, out: str, **bridged: Tensor) -> Tensor:
        """Call `fn(*args, **bridged)`: between two pieces if the graph is piecewise, in place otherwise. Each keyword
        names the bridge buffer that carries its tensor across the break; `out` names the buffer for the result, which
        may have another shape but must have the buffer's dtype and number of elements."""
        into = self._views[out]
        if self._splitter is None:
            return conform(fn(*args, **bridged), into, f"the result of {call_name(fn)}")
        return self._splitter.outside(fn, args, bridged, into)


def run_body(body: Body, frame: Frame) -> None:
    """Run a body and copy each result into its output buffer."""
    results = body(frame) or {}
    outputs = {name for name, buffer in frame.arena.buffers.items() if buffer.role is Role.OUTPUT}
    if unknown := results.keys() - outputs:
        raise GraphError(f"body returned {sorted(unknown)[0]!r}; declared outputs are {', '.join(sorted(outputs))}")
    for name, result in results.items():
        store(frame[name], result, f"output {name!r}")


def store(buffer: Tensor, value: Tensor, what: str) -> None:
    """Copy a value into a static buffer, unless it was computed in place."""
    if value.data_ptr() == buffer.data_ptr() and value.is_contiguous() and value.numel() == buffer.numel():
        return
    buffer.copy_(conform(value, buffer, what))


def conform(value: Tensor, buffer: Tensor, what: str) -> Tensor:
    if value.numel() != buffer.numel() or value.dtype != buffer.dtype:
        given, allowed = f"{tuple(value.shape)} {value.dtype}", f"{tuple(buffer.shape)} {buffer.dtype}"
        raise GraphError(f"{what} is {given}; its buffer is {allowed}: number of elements and dtype must agree")
    return value.reshape(buffer.shape)


def call_name(fn: Callable[..., Any]) -> str:
    return getattr(getattr(fn, "func", fn), "__qualname__", type(fn).__name__)

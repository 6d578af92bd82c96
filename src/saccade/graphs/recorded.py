"""The CPU counterpart of a CUDA graph: operations recorded once and replayed on the same storages.

Like a CUDA graph it freezes every host value that the body used, keeps every address, and does not rerun the body's
Python. So graph bugs show on any machine: a boundary read on the host while recording is stale in every later replay.
As in a CUDA pool, the graphs of a lane share the memory of their temporaries. Two things differ: recording runs the
operations, and within one graph no two temporaries share memory.
"""

import threading
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._pytree import tree_map

from saccade.errors import CaptureError
from saccade.graphs.nodes import Node, Recording, describe
from saccade.graphs.operation_mode import OperationMode

Range = tuple[int, int]  # of addresses: from the first to behind the last

aten = torch.ops.aten
# Operations that allocate but write nothing: a replay skips them.
EMPTY = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided)


class RecordedLane:
    """Records on the CPU, with the interface of `CudaLane`."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.num_uses = 0
        self._recorder: _Recorder | None = None
        self._recording = ExitStack()
        self._pool = _Pool()

    @property
    def nbytes(self) -> int:
        return self._pool.nbytes

    @contextmanager
    def session(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._pool.release()

    @contextmanager
    def keeping_nodes(self) -> Iterator[None]:
        """Nothing to do: recorded pieces can always list their nodes."""
        yield

    def memory(self) -> tuple[list[Range], list[Range]]:
        """What else a CPU holds is unknown."""
        return [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in self._pool.storages], []

    def reserve_small(self) -> None:
        """Not needed: temporaries are few, small and already shared."""

    def begin(self) -> None:
        self._recorder = _Recorder(self._pool)
        self._recording.enter_context(self._recorder)

    def end(self) -> Recording | None:
        recorder, self._recorder = self._recorder, None
        assert recorder is not None, "end() without begin()"
        self._recording.close()
        return RecordedPiece(tuple(recorder.operations)) if recorder.operations else None

    def abandon(self) -> None:
        self._recorder = None
        self._recording.close()


@dataclass(frozen=True, slots=True)
class _Operation:
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Tensor | None, ...]  # where each fresh result goes; None for one that aliases an argument

    def node(self) -> Node:
        names = [argument.name for argument in self.function._schema.arguments]
        given = {**dict(zip(names, self.args, strict=False)), **self.kwargs}
        return describe(str(self.function), {**given, "result": [t for t in self.results if t is not None]})


class RecordedPiece:
    def __init__(self, operations: tuple[_Operation, ...]) -> None:
        self.operations = operations
        self._calls = [(one.function._op, one.args, one.kwargs, one.results) for one in operations]

    def __call__(self) -> None:
        with torch.no_grad():
            for call, args, kwargs, homes in self._calls:
                result = call(*args, **kwargs)
                for home, found in zip(homes, (result,) if len(homes) == 1 else leaves_of(result), strict=True):
                    if home is not None:
                        home.copy_(found)

    def nodes(self) -> list[Node]:
        return [operation.node() for operation in self.operations]


class _Pool:
    """Memory for temporaries. A graph may reuse that of another, because graphs of a lane never run concurrently."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.storages: list[UntypedStorage] = []
        self._free: list[UntypedStorage] = []  # smallest first
        self._taken: list[UntypedStorage] = []

    def take(self, nbytes: int) -> UntypedStorage:
        at = bisect_left(self._free, nbytes, key=UntypedStorage.nbytes)
        storage = self._free.pop(at) if at < len(self._free) else self._new(nbytes)
        self._taken.append(storage)
        return storage

    def release(self) -> None:
        self._free = sorted([*self._free, *self._taken], key=UntypedStorage.nbytes)
        self._taken = []

    def _new(self, nbytes: int) -> UntypedStorage:
        storage = torch.empty(nbytes, dtype=torch.uint8).untyped_storage()
        self.storages.append(storage)
        self.nbytes += nbytes
        return storage


class _Recorder(OperationMode):
    def __init__(self, pool: _Pool) -> None:
        super().__init__()
        self.operations: list[_Operation] = []
        self._pool = pool

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        _refuse_host_reads(func, args, kwargs)
        result = func(*args, **kwargs)
        given = storages_of((args, kwargs))
        moved: dict[int, UntypedStorage] = {}

        def pooled(leaf: Any) -> Any:
            return self._pooled(leaf, moved) if is_fresh(leaf, given) else leaf

        result = pooled(result) if isinstance(result, Tensor) else tree_map(pooled, result)
        fresh = tuple(leaf if is_fresh(leaf, given) else None for leaf in leaves_of(result))
        does_nothing = not func._schema.is_mutable and not any(t is not None for t in fresh)  # only makes a view
        if not does_nothing and func.overloadpacket not in EMPTY:
            self.operations.append(_Operation(func, args, kwargs, fresh))
        return result

    def _pooled(self, tensor: Tensor, moved: dict[int, UntypedStorage]) -> Tensor:
        source = tensor.untyped_storage()
        nbytes = source.nbytes()
        if nbytes == 0:
            return tensor
        target = moved.get(source.data_ptr())
        if target is None:
            target = moved[source.data_ptr()] = self._pool.take(nbytes)
        home = torch.empty(0, dtype=tensor.dtype).set_(target, tensor.storage_offset(), tensor.shape, tensor.stride())
        return home.copy_(tensor)


def leaves_of(value: Any) -> list[Any]:
    """torch's `tree_leaves` for arguments and results of operations, several times as fast."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return [value]
    found: list[Any] = []
    for part in value:
        if isinstance(part, list | tuple | dict):
            found += leaves_of(part)
        else:
            found.append(part)
    return found


def storages_of(values: Any) -> set[int]:
    return {leaf.untyped_storage().data_ptr() for leaf in leaves_of(values) if isinstance(leaf, Tensor)}


def is_fresh(leaf: Any, given: set[int]) -> bool:
    """Whether a result is a tensor outside the given storages."""
    return isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in given


def _refuse_host_reads(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse what a CUDA capture refuses: operations that make the host wait for a value or a shape."""
    if torch.Tag.data_dependent_output not in func.tags and torch.Tag.dynamic_output_shape not in func.tags:
        return
    if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
        is_mask = any(isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8) for t in args[1])
        if not is_mask:
            return
    if func.overloadpacket is aten.repeat_interleave and kwargs.get("output_size") is not None:
        return
    raise CaptureError(f"{func} makes the host wait for a value on the device, which a graph cannot capture")

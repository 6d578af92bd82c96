"""The CPU twin of a CUDA graph: operations recorded once and replayed on the same storages.

Like a CUDA graph it freezes every host value that the body used, keeps every address, and runs no Python of the body
again. So what goes wrong with a graph goes wrong here too, on any machine: a boundary read on the host while
recording is stale in every later replay.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from saccade.errors import CaptureError

aten = torch.ops.aten


class RecordedLane:
    """Records on the CPU. Same interface as `CudaLane`."""

    def __init__(self) -> None:
        self._recorder: _Recorder | None = None
        self._recording = ExitStack()
        self._held_bytes = 0

    @property
    def nbytes(self) -> int:
        return self._held_bytes

    @contextmanager
    def session(self) -> Iterator[None]:
        yield

    def reserve_small(self) -> None:
        """Every recorded graph holds its own."""

    def begin(self) -> None:
        self._recorder = _Recorder()
        self._recording.enter_context(self._recorder)

    def end(self) -> Callable[[], None] | None:
        recorder, self._recorder = self._recorder, None
        assert recorder is not None, "end() without begin()"
        self._recording.close()
        self._held_bytes += sum(recorder.made.values())
        operations = tuple(recorder.operations)
        return (lambda: _replay(operations)) if operations else None

    def abandon(self) -> None:
        self._recorder = None
        self._recording.close()


@dataclass(frozen=True, slots=True)
class _Operation:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Tensor | None, ...]  # where to put each fresh result; None for one that aliases an argument


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[_Operation] = []
        self.made: dict[int, int] = {}  # bytes of every storage that the body made

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        _refuse_host_reads(func, args, kwargs)
        result = func(*args, **kwargs)
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        fresh = tuple(
            leaf if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in given else None
            for leaf in tree_leaves(result)
        )
        self.made |= {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in fresh if t is not None}
        does_nothing = not func._schema.is_mutable and not any(t is not None for t in fresh)  # a view, already made
        if not does_nothing and func.overloadpacket not in _LEAVES_MEMORY_AS_IT_IS:
            self.operations.append(_Operation(func, args, kwargs, fresh))
        return result


_LEAVES_MEMORY_AS_IT_IS = (
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
)


def _refuse_host_reads(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse what a CUDA capture refuses: an operation whose value or shape the host must wait for."""
    if torch.Tag.data_dependent_output not in func.tags and torch.Tag.dynamic_output_shape not in func.tags:
        return
    if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
        is_mask = any(isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8) for t in args[1])
        if not is_mask:
            return
    if func.overloadpacket is aten.repeat_interleave and kwargs.get("output_size") is not None:
        return
    raise CaptureError(f"{func} makes the host wait for a value on the device, which no graph can capture")


def _replay(operations: tuple[_Operation, ...]) -> None:
    with torch.no_grad():
        for operation in operations:
            results = tree_leaves(operation.function(*operation.args, **operation.kwargs))
            for home, result in zip(operation.results, results, strict=True):
                if home is not None:
                    home.copy_(result)

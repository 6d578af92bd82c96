"""Operations of a captured piece with their arguments, for comparing two captures."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Touch:
    """Memory that an argument points to: its start and layout."""

    address: int
    layout: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """One operation of a graph: plain argument values, and the memory it touches. `raw` has argument bytes as passed to
    a kernel; words in them may be addresses."""

    name: str
    values: Mapping[str, Any] = field(default_factory=dict)
    touches: Mapping[str, Touch] = field(default_factory=dict)
    raw: Mapping[str, bytes] = field(default_factory=dict)


class Recording(Protocol):
    """A piece of a graph, or a call between two, that can be replayed and can list its operations."""

    def __call__(self) -> None: ...

    def nodes(self) -> list[Node]: ...


def describe(name: str, arguments: Mapping[str, Any]) -> Node:
    values: dict[str, Any] = {}
    touches: dict[str, Touch] = {}
    for path, leaf in _leaves(arguments):
        if isinstance(leaf, Tensor):
            touches[path] = touch(leaf)
        else:
            values[path] = _plain(leaf)
    return Node(name, values, touches)


def touch(tensor: Tensor) -> Touch:
    strides = "" if tensor.is_contiguous() else f" strides {tuple(tensor.stride())}"
    return Touch(tensor.data_ptr(), f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{strides}")


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and not _is_frame(value):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{path}[{i}]")
    else:
        yield path, value


def _is_frame(value: Any) -> bool:
    """A frame is a mapping, too, but gives access to buffers rather than being made of tensors."""
    return hasattr(value, "capacity") and hasattr(value, "outside")


def _plain(value: Any) -> Any:
    """A comparable form: numbers and strings as they are, arrays by content, other objects by type."""
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tobytes())
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)  # so that nan equals nan, and 1 is not 1.0
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return str(value)
    return type(value).__qualname__

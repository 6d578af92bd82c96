"""Reads the nodes of a captured CUDA graph through the driver: kernels with grids and argument bytes, copies, fills."""

from ctypes import (
    CDLL,
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_int,
    c_size_t,
    c_uint,
    c_uint64,
    c_void_p,
    cast,
    string_at,
)
from functools import cache
from typing import Any

import torch

from saccade.errors import GraphError
from saccade.graphs.nodes import Node

KERNEL, COPY, FILL = 0, 1, 2  # CUgraphNodeType
KINDS = {
    3: "host call",
    4: "child graph",
    5: "empty",
    6: "wait for event",
    7: "record event",
    10: "allocate",
    11: "free",
}
# Markers in the `extra` list of a launch: the next entry is the buffer of all arguments, or the address of its size.
BUFFER_POINTER, BUFFER_SIZE = 1, 2
MAX_ARGUMENTS = 256


class CudaPiece:
    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self.graph = graph

    def __call__(self) -> None:
        self.graph.replay()

    def nodes(self) -> list[Node]:
        """Only for graphs captured under `keeping_nodes`."""
        return read_nodes(self.graph.raw_cuda_graph())


def read_nodes(graph: int) -> list[Node]:
    """Every node of a graph, in capture order."""
    count = c_size_t()
    _call("cuGraphGetNodes", c_void_p(graph), None, byref(count))
    handles = (c_void_p * count.value)()
    _call("cuGraphGetNodes", c_void_p(graph), handles, byref(count))
    return [_read(c_void_p(handle)) for handle in handles]


class _KernelParams(Structure):
    _fields_ = (
        ("function", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("arguments", POINTER(c_void_p)),
        ("extra", POINTER(c_void_p)),
        ("kernel", c_void_p),
        ("context", c_void_p),
    )


class _Side(Structure):
    _fields_ = (
        ("offsets", c_size_t * 4),  # x in bytes, y, z, level
        ("memory_type", c_uint),
        ("host", c_void_p),
        ("device", c_uint64),
        ("array", c_void_p),
        ("reserved", c_void_p),
        ("pitch", c_size_t),
        ("height", c_size_t),
    )


class _CopyParams(Structure):
    _fields_ = (("source", _Side), ("target", _Side), ("extent", c_size_t * 3))


class _FillParams(Structure):
    _fields_ = (
        ("target", c_uint64),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("element_bytes", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
    )


def _read(node: c_void_p) -> Node:
    kind = c_int()
    _call("cuGraphNodeGetType", node, byref(kind))
    if kind.value == KERNEL:
        return _read_kernel(node)
    if kind.value == COPY:
        copied = _CopyParams()
        _call("cuGraphMemcpyNodeGetParams", node, byref(copied))
        sides = {"source": copied.source, "target": copied.target}
        addresses = {name: int(side.device or side.host or 0) for name, side in sides.items()}
        values = {"bytes": tuple(copied.extent), **{f"{n} kind": side.memory_type for n, side in sides.items()}}
        return Node("copy", values, raw={name: address.to_bytes(8, "little") for name, address in addresses.items()})
    if kind.value == FILL:
        filled = _FillParams()
        _call("cuGraphMemsetNodeGetParams", node, byref(filled))
        size = (filled.width, filled.height, filled.element_bytes)
        return Node("fill", {"value": filled.value, "size": size}, raw={"target": filled.target.to_bytes(8, "little")})
    return Node(KINDS.get(kind.value, f"node of kind {kind.value}"))


def _read_kernel(node: c_void_p) -> Node:
    params = _KernelParams()
    _call("cuGraphKernelNodeGetParams_v2", node, byref(params))
    function = params.function or _function_of(params.kernel)
    values = {"grid": tuple(params.grid), "block": tuple(params.block), "shared bytes": params.shared_bytes}
    raw: dict[str, bytes] = {}
    if params.arguments:
        arguments = _arguments_of(function)
        addresses = params.arguments[: len(arguments)]
        raw = {name: string_at(address, size) for (name, size), address in zip(arguments, addresses, strict=True)}
    elif params.extra:
        raw = _packed_arguments(params.extra)
    return Node(_name_of(function), values, raw=raw)


def _packed_arguments(extra: Any) -> dict[str, bytes]:
    """Some libraries pass all arguments of a launch in one buffer."""
    address, size = 0, 0
    for i in range(0, 8, 2):
        if extra[i] == BUFFER_POINTER:
            address = extra[i + 1]
        elif extra[i] == BUFFER_SIZE:
            size = cast(extra[i + 1], POINTER(c_size_t))[0]
        else:
            break
    return {"arguments": string_at(address, size)} if address and size else {}


@cache
def _function_of(kernel: int) -> int:
    function = c_void_p()
    _call("cuKernelGetFunction", byref(function), c_void_p(kernel))
    return function.value or 0


@cache
def _arguments_of(function: int) -> tuple[tuple[str, int], ...]:
    """The names and sizes of its arguments."""
    found: list[tuple[str, int]] = []
    offset, size = c_size_t(), c_size_t()
    for i in range(MAX_ARGUMENTS):
        if _driver("cuFuncGetParamInfo")(c_void_p(function), c_size_t(i), byref(offset), byref(size)):
            break  # there is no argument i
        found.append((f"argument {i}", size.value))
    return tuple(found)


@cache
def _name_of(function: int) -> str:
    name = c_char_p()
    _call("cuFuncGetName", byref(name), c_void_p(function))
    return (name.value or b"").decode(errors="replace")


class UnreadableError(GraphError):
    """The driver cannot list a graph's nodes, so nothing can be audited. The graph itself may be fine."""


def _call(name: str, *arguments: Any) -> None:
    if status := _driver(name)(*arguments):
        raise UnreadableError(f"{name} failed with CUDA error {status}: a graph's nodes cannot be read")


@cache
def _driver(name: str) -> Any:
    try:
        return getattr(CDLL("libcuda.so.1"), name)
    except OSError as error:
        raise UnreadableError(
            f"a graph's nodes are read through the CUDA driver, which did not load: {error}"
        ) from error
    except AttributeError:
        raise UnreadableError(
            f"a graph's nodes are read with {name}, which this CUDA driver does not have: update it"
        ) from None

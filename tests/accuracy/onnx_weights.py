"""Reads the weights of an ONNX file without the onnx package. An ONNX file is a protobuf message, of which only the
initializers are read."""

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

MODEL_GRAPH, GRAPH_INITIALIZER = 7, 5
DIMS, DTYPE, FLOATS, INTS, NAME, RAW = 1, 2, 4, 5, 8, 9
DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<f4"), 2: np.dtype("u1"), 3: np.dtype("i1"), 7: np.dtype("<i8")}
Array = npt.NDArray[Any]


def read_weights(data: bytes) -> dict[str, Array]:
    """All floating-point weights by name. `X_quantized`, minus its zero point and times its scale, becomes `X`."""
    (graph,) = [value for field, value in _fields(memoryview(data)) if field == MODEL_GRAPH]
    found = dict(_tensor(value) for field, value in _fields(graph) if field == GRAPH_INITIALIZER)
    weights = {name: value for name, value in found.items() if value.dtype == np.float32 and value.ndim}
    for name, value in found.items():
        stem = name.removesuffix("_quantized")
        if stem != name:
            zero, scale = found[f"{stem}_zero_point"], found[f"{stem}_scale"]
            weights[stem] = (value.astype(np.float32) - np.float32(zero)) * np.float32(scale)
    return weights


def _tensor(message: memoryview) -> tuple[str, Array]:
    parts: dict[int, list[Any]] = {}
    for field, value in _fields(message):
        parts.setdefault(field, []).append(value)
    dtype = DTYPES[parts[DTYPE][0]]
    shape = _integers(parts.get(DIMS, []))
    if RAW in parts:
        values = np.frombuffer(parts[RAW][0], dtype)
    elif FLOATS in parts:
        values = np.frombuffer(b"".join(parts[FLOATS]), dtype)
    else:
        values = np.array(_integers(parts.get(INTS, [])), np.int64).astype(dtype)
    return bytes(parts[NAME][0]).decode(), values.reshape(shape)


def _integers(values: list[Any]) -> list[int]:
    """The values of a repeated field, which may be packed."""
    found = []
    for value in values:
        if isinstance(value, int):
            found.append(_signed(value))
            continue
        at = 0
        while at < len(value):
            number, at = _varint(value, at)
            found.append(_signed(number))
    return found


def _signed(number: int) -> int:
    unpacked: int = struct.unpack("<q", struct.pack("<Q", number))[0]
    return unpacked


def _fields(message: memoryview) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        match tag & 7:
            case 0:
                value, at = _varint(message, at)
                yield tag >> 3, value
            case 1 | 5 as kind:
                size = 8 if kind == 1 else 4
                yield tag >> 3, message[at : at + size]
                at += size
            case 2:
                size, at = _varint(message, at)
                yield tag >> 3, message[at : at + size]
                at += size
            case kind:
                raise ValueError(f"wire type {kind} at byte {at} is not used by ONNX")


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = message[at]
        at += 1
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return number, at

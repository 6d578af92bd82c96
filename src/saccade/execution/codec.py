"""Packs messages with numpy arrays into flat bytes, and unpacks them without copying the arrays. A packed message is a
prefix, a msgpack head (with dtype, shape and offset of each array), and the aligned bytes of every array. Nothing is
unpickled: only the types that a message's annotations name are decoded."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import MsgspecError, msgpack

from saccade.errors import SaccadeError

ALIGNMENT = 64
Bytes = npt.NDArray[np.uint8]

_PREFIX = struct.Struct("<III")  # type index, head bytes, number of array references
_KINDS = "biufc"  # bool, integers, floats, complex: dtypes without object references


class CodecError(SaccadeError):
    """A message cannot be packed or unpacked."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A message ready to be written. `arrays` still belong to the sender."""

    head: bytes
    arrays: Sequence[tuple[int, npt.NDArray[Any]]]
    num_bytes: int

    def write(self, target: Bytes) -> None:
        """Writes to the first `num_bytes` of `target`, which must start at an aligned address."""
        target[: len(self.head)] = np.frombuffer(self.head, np.uint8)
        start, buffer = aligned(len(self.head)), target.data
        for offset, array in self.arrays:
            np.ndarray(array.shape, array.dtype, buffer, start + offset)[...] = array


class Codec:
    """Packs and unpacks the message types one side sends: frozen dataclasses and msgspec Structs. Fields may be
    anything msgspec supports, and arrays of numbers annotated `NDArray[...]` or `NDArray[...] | None`. A union of
    several classes needs Structs with `tag=True`. Both sides must be given the same types in the same order."""

    def __init__(self, *types: type) -> None:
        self._types = types
        self._indices = {kind: index for index, kind in enumerate(types)}
        for kind in types:
            try:
                msgpack.Decoder(kind, dec_hook=lambda kind, value: value)
            except TypeError as error:
                raise CodecError(
                    f"{kind.__name__} cannot be a message: {error} (members of a union must be Structs with tag=True)"
                ) from error

    def pack(self, message: object) -> Packed:
        index = self._indices.get(type(message))
        if index is None:
            names = ", ".join(kind.__name__ for kind in self._types)
            raise CodecError(f"{type(message).__name__} is not a message type; known types are {names}")
        arrays: list[tuple[int, npt.NDArray[Any]]] = []
        known: dict[int, object] = {}  # an array referenced twice is sent once
        num_found = end = 0

        def describe(value: object) -> object:
            nonlocal end, num_found
            if isinstance(value, np.generic):
                return value.item()
            if not isinstance(value, np.ndarray):
                raise CodecError(f"a value of type {type(value).__name__} cannot be sent")
            if value.dtype.kind not in _KINDS:
                raise CodecError(f"an array of {value.dtype} cannot be sent; only numbers and bool can")
            num_found += 1
            if id(value) not in known:
                offset = aligned(end)
                end = offset + value.nbytes
                arrays.append((offset, value))
                known[id(value)] = value.dtype.str, value.shape, offset
            return known[id(value)]

        body = msgpack.encode(message, enc_hook=describe)
        head = _PREFIX.pack(index, len(body), num_found) + body
        return Packed(head, arrays, aligned(len(head)) + end)

    def unpack(self, packed: Bytes) -> Any:
        """The message's arrays are views of `packed`, which must be aligned, and are read-only if it is."""
        index, num_bytes, num_arrays = _PREFIX.unpack_from(packed.data)
        body = packed[_PREFIX.size :][:num_bytes]
        start = aligned(_PREFIX.size + num_bytes)
        buffer = packed.data
        num_found = 0

        def find(kind: object, value: Any) -> npt.NDArray[Any]:
            nonlocal num_found
            num_found += 1
            dtype, shape, offset = value
            return np.ndarray(shape, dtype, buffer, start + offset)

        kind = self._types[index]
        try:
            message = msgpack.decode(body.data, type=kind, dec_hook=find)
        except MsgspecError as error:
            raise CodecError(f"received an invalid {kind.__name__}: {error}") from error
        if num_found != num_arrays:
            raise CodecError(f"{num_arrays - num_found} arrays of {kind.__name__} are in fields annotated otherwise")
        return message


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT

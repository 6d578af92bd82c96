"""Messages with numpy arrays inside as flat bytes, and back without copying the arrays.

A packed message is a prefix, a msgpack head, and the bytes of every array, each aligned. In the head an array is its
dtype, its shape and where its bytes lie. Nothing is unpickled: what comes out is what the
annotations of the message say.
"""

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

_PREFIX = struct.Struct("<III")  # index of the type, bytes of the head, mentions of arrays
_KINDS = "biufc"  # bool, integers, floats, complex: what has no references in it


class CodecError(SaccadeError):
    """A message cannot be packed or unpacked."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A message that is ready to be written: `arrays` are still the sender's own."""

    head: bytes
    arrays: Sequence[tuple[int, npt.NDArray[Any]]]
    num_bytes: int

    def write(self, target: Bytes) -> None:
        """Takes the first `num_bytes` of `target`, which begins at an aligned address."""
        target[: len(self.head)] = np.frombuffer(self.head, np.uint8)
        start, buffer = aligned(len(self.head)), target.data
        for offset, array in self.arrays:
            np.ndarray(array.shape, array.dtype, buffer, start + offset)[...] = array


class Codec:
    """Knows the types of message that one side sends: frozen dataclasses and msgspec Structs.

    Inside they may have whatever msgspec takes, and arrays of numbers where the annotation says so (`NDArray[...]` or
    `NDArray[...] | None`). A union of several classes needs Structs with `tag=True`. Both sides must be given the same
    types in the same order.
    """

    def __init__(self, *types: type) -> None:
        self._types = types
        self._indices = {kind: index for index, kind in enumerate(types)}
        for kind in types:
            try:
                msgpack.Decoder(kind, dec_hook=lambda kind, value: value)
            except TypeError as error:
                raise CodecError(
                    f"{kind.__name__} cannot be a message: {error} (members of a union: Structs with tag=True)"
                ) from error

    def pack(self, message: object) -> Packed:
        index = self._indices.get(type(message))
        if index is None:
            names = ", ".join(kind.__name__ for kind in self._types)
            raise CodecError(f"a {type(message).__name__} is no message; known are: {names}")
        arrays: list[tuple[int, npt.NDArray[Any]]] = []
        known: dict[int, object] = {}  # an array that is in a message twice is sent once
        num_found = end = 0

        def describe(value: object) -> object:
            nonlocal end, num_found
            if isinstance(value, np.generic):
                return value.item()
            if not isinstance(value, np.ndarray):
                raise CodecError(f"a {type(value).__name__} cannot be sent")
            if value.dtype.kind not in _KINDS:
                raise CodecError(f"an array of {value.dtype} cannot be sent; allowed are numbers and bool")
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
        """The arrays of the message are views of `packed`, which must be aligned; read-only where it is."""
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
            raise CodecError(f"this is no {kind.__name__}: {error}") from error
        if num_found != num_arrays:
            raise CodecError(f"{num_arrays - num_found} arrays of a {kind.__name__} lie where no annotation says so")
        return message


def aligned(num_bytes: int) -> int:
    """The next offset at which an array may begin."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT

"""Graph keys and decisions. Everything a capture freezes is a function of its key."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np

from saccade.config import Mode, Tier

_INT64 = np.dtype("<i8")


@dataclass(frozen=True, slots=True)
class Capacity(Mapping[str, int]):
    """The size of each dimension, such as tokens=1024 segments=17: of a batch, or what a graph has room for."""

    sizes: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, sizes: Mapping[str, int] | None = None, /, **named: int) -> "Capacity":
        if not named and isinstance(sizes, Capacity):
            return sizes
        return cls(tuple(sorted({**({} if sizes is None else sizes), **named}.items())))

    def __getitem__(self, dimension: str) -> int:
        for name, size in self.sizes:
            if name == dimension:
                return size
        raise KeyError(dimension)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in self.sizes)


class GraphKey(msgspec.Struct, frozen=True):
    """Phase, mode and capacity; for an exact graph also the digest of the boundaries it was captured with."""

    phase: str
    mode: Mode
    capacity: Capacity
    digest: str = ""

    def __str__(self) -> str:
        exact = f" exact={self.digest[:12]}" if self.digest else ""
        return f"{self.phase}/{self.mode} {self.capacity}{exact}"


class Reason(StrEnum):
    """Why a batch was run the way it was."""

    EXACT_GRAPH = "its structure has a graph of its own"
    FITS_BUCKET = "it fits a bucket"
    GRAPHS_OFF = "graphs are off"
    TOO_LARGE = "it is larger than every bucket"
    NOT_CAPTURED = "no graph is captured for it yet"
    EAGER_FASTER = "a replay measured no faster"
    OUT_OF_SERVICE = "its graph was found wrong and taken out of service"


class Decision(msgspec.Struct, frozen=True):
    """How to run one batch, and why. With a `key`, its graph is replayed. Without one the batch runs eagerly, padded to
    `padded_to` if given. With graphs off a batch is still padded to its bucket, so its outputs have the same bits as a
    replay of the bucket's graph."""

    tier: Tier
    reason: Reason
    key: GraphKey | None = None
    detail: str = ""
    padded_to: Capacity | None = None

    @property
    def why(self) -> str:
        return f"{self.reason} ({self.detail})" if self.detail else str(self.reason)

    def __str__(self) -> str:
        place = f" [{self.key}]" if self.key else ""
        return f"{self.tier}{place}: {self.why}"


def structure_digest(structure: Mapping[str, Sequence[int] | np.ndarray[Any, np.dtype[Any]]]) -> str:
    """Digest of all boundaries of a batch. It covers names, counts and values, so that different structures get
    different digests. Takes host integers only: computing a key must never wait for the GPU."""
    state = blake2b(digest_size=16)
    for name in sorted(structure):
        values = np.asarray(structure[name], dtype=_INT64)
        state.update(f"{name}:{values.size};".encode() + values.tobytes())
    return state.hexdigest()

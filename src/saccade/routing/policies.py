"""In which order replicas are tried. All policies are deterministic, even across processes and machines."""

from collections.abc import Mapping
from hashlib import blake2b
from math import ceil
from typing import Protocol

import numpy as np
import numpy.typing as npt

from saccade.errors import ConfigError

BOUND = 1.25
_Words = npt.NDArray[np.uint64]


class Policy(Protocol):
    def order(self, key: bytes, tokens: int, loads: Mapping[str, int]) -> list[str]:
        """All replicas, the preferred one first; the others are alternatives if it is gone. `loads` are the tokens
        queued and running on each replica, `tokens` those that the request adds."""
        ...


class ConsistentHashing:
    """Every key has its own order of replicas (rendezvous hashing), so a replica that joins or leaves moves only its
    own keys. The request goes to the first replica whose load, request included, stays within `bound` times the mean or
    within `room_tokens`, whichever is more. So one hot image spreads over as many replicas as it needs. If no replica
    is within the bound, the least loaded one takes the request."""

    def __init__(self, bound: float = BOUND, room_tokens: int = 0) -> None:
        """Up to a load of `room_tokens` a replica is not busy, so moving to another one gains nothing."""
        if not bound >= 1:
            raise ConfigError(f"the bound of a replica's load is {bound}; it must be at least 1, the mean")
        self.bound, self.room_tokens = bound, room_tokens
        self._names: tuple[str, ...] = ()
        self._seeds: _Words = np.zeros(0, dtype=np.uint64)

    def order(self, key: bytes, tokens: int, loads: Mapping[str, int]) -> list[str]:
        ranked = self.ranked(key, loads)
        most = self.most_tokens(tokens, loads)
        for at, name in enumerate(ranked):
            if loads[name] + tokens <= most:
                return [name, *ranked[:at], *ranked[at + 1 :]]
        return sorted(ranked, key=loads.__getitem__)  # stable: equal loads keep the key's order

    def most_tokens(self, tokens: int, loads: Mapping[str, int]) -> int:
        """The load that a replica may reach by taking a request of `tokens`."""
        return max(ceil(self.bound * (sum(loads.values()) + tokens) / max(len(loads), 1)), self.room_tokens)

    def ranked(self, key: bytes, names: Mapping[str, int]) -> list[str]:
        """The key's order of the replicas, regardless of their loads."""
        if tuple(names) != self._names:
            self._names = tuple(names)
            self._seeds = np.array([_word(name.encode()) for name in names], dtype=np.uint64)
        scores = _mixed(self._seeds ^ np.uint64(_word(key)))
        return [self._names[i] for i in np.lexsort((self._seeds, scores))]


class RoundRobin:
    """Each replica in turn, regardless of the key."""

    def __init__(self) -> None:
        self._next = 0

    def order(self, key: bytes, tokens: int, loads: Mapping[str, int]) -> list[str]:
        names = sorted(loads)
        at = self._next % max(len(names), 1)
        self._next += 1
        return names[at:] + names[:at]


class LeastLoaded:
    """The replica with the fewest tokens; among equals, each in turn."""

    def __init__(self) -> None:
        self._turn = RoundRobin()

    def order(self, key: bytes, tokens: int, loads: Mapping[str, int]) -> list[str]:
        return sorted(self._turn.order(key, tokens, loads), key=loads.__getitem__)


POLICIES = ("affinity", "least-loaded", "round-robin")


def make_policy(name: str, *, room_tokens: int = 0) -> Policy:
    if name == "affinity":
        return ConsistentHashing(room_tokens=room_tokens)
    if name == "round-robin":
        return RoundRobin()
    if name == "least-loaded":
        return LeastLoaded()
    raise ConfigError(f"the routing policy is {name!r}; allowed: {', '.join(POLICIES)}")


def _word(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8, person=b"saccade.ring").digest(), "little")


def _mixed(words: _Words) -> _Words:
    """A permutation of 64-bit words in which every input bit affects every output bit (MurmurHash3's finalizer)."""
    words = words ^ (words >> np.uint64(33))
    words = words * np.uint64(0xFF51AFD7ED558CCD)
    words = words ^ (words >> np.uint64(33))
    words = words * np.uint64(0xC4CEB9FE1A85EC53)
    return words ^ (words >> np.uint64(33))

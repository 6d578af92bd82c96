"""Orders in which replicas are tried. All policies are deterministic, also across processes and machines."""

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
        """All replicas, the one to take first; the others are for when it is gone. `loads` are the tokens queued and
        running on each replica, `tokens` those the request adds."""
        ...


class ConsistentHashing:
    """Every key has an order of replicas of its own (rendezvous hashing), so that a replica that joins or leaves moves
    only the keys it takes or had. The first replica whose load stays within the bound takes the request: at most
    `bound` times the mean, the request included, or `room_tokens`, whichever is more. So one hot image spreads over as
    many replicas as it needs. Where nobody is within the bound, the least loaded one takes it."""

    def __init__(self, bound: float = BOUND, room_tokens: int = 0) -> None:
        """`room_tokens`: a load at which a replica is not busy yet, so that leaving it for another gains nothing."""
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
        """The load that no replica may exceed by taking a request of `tokens`."""
        return max(ceil(self.bound * (sum(loads.values()) + tokens) / max(len(loads), 1)), self.room_tokens)

    def ranked(self, key: bytes, names: Mapping[str, int]) -> list[str]:
        """The key's own order of the replicas, whatever their loads."""
        if tuple(names) != self._names:
            self._names = tuple(names)
            self._seeds = np.array([_word(name.encode()) for name in names], dtype=np.uint64)
        scores = _mixed(self._seeds ^ np.uint64(_word(key)))
        return [self._names[i] for i in np.lexsort((self._seeds, scores))]


class RoundRobin:
    """Each replica in turn, whatever a request is about."""

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
    """A permutation of 64-bit words in which every input bit reaches every output bit (MurmurHash3's last step)."""
    words = words ^ (words >> np.uint64(33))
    words = words * np.uint64(0xFF51AFD7ED558CCD)
    words = words ^ (words >> np.uint64(33))
    words = words * np.uint64(0xC4CEB9FE1A85EC53)
    return words ^ (words >> np.uint64(33))

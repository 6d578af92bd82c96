"""Keeps the replicas and their loads, and assigns requests to them."""

from collections.abc import Collection
from dataclasses import dataclass

from saccade.routing.policies import Policy


@dataclass(slots=True)
class _Member:
    name: str
    tokens: int = 0
    num_requests: int = 0


@dataclass(frozen=True, slots=True)
class Assignment:
    """A request that a replica took. It counts until `Router.finish`."""

    member: _Member
    tokens: int

    @property
    def replica(self) -> str:
        return self.member.name


class Router:
    """Invariant: a replica's load is the sum of its unfinished assignments since it joined."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._members: dict[str, _Member] = {}

    @property
    def loads(self) -> dict[str, int]:
        """Tokens queued and running, by replica."""
        return {name: member.tokens for name, member in self._members.items()}

    @property
    def num_requests(self) -> dict[str, int]:
        return {name: member.num_requests for name, member in self._members.items()}

    def join(self, name: str) -> None:
        """Adds a replica. Does nothing if it is already known."""
        self._members.setdefault(name, _Member(name))

    def leave(self, name: str) -> None:
        """Removes a replica. Its assignments no longer count, even if it joins again."""
        self._members.pop(name, None)

    def assign(self, key: bytes, tokens: int, avoid: Collection[str] = ()) -> Assignment | None:
        """Assigns a request to a replica, never to one in `avoid`. None if there is no replica left."""
        loads = {name: member.tokens for name, member in self._members.items() if name not in avoid}
        if not loads:
            return None
        return self.place(self.policy.order(key, tokens, loads)[0], tokens)

    def place(self, name: str, tokens: int) -> Assignment:
        """Counts a request for a replica that somebody else chose."""
        member = self._members[name]
        member.tokens += tokens
        member.num_requests += 1
        return Assignment(member, tokens)

    def finish(self, assignment: Assignment) -> None:
        """Call once for every assignment."""
        assignment.member.tokens -= assignment.tokens
        assignment.member.num_requests -= 1
        assert assignment.member.tokens >= 0 <= assignment.member.num_requests, f"finished twice: {assignment}"

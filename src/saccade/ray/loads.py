"""What a process that sends requests knows of the replicas' loads."""

from typing import Any

from saccade.ray.ray_messages import Route
from saccade.routing import Assignment, LeastLoaded, Router, make_policy


class Loads:
    """Tokens by replica, and who has which request. A request counts from when a replica is chosen for it."""

    def __init__(self, policy: str, room_tokens: int) -> None:
        self._router = Router(make_policy(policy, room_tokens=room_tokens))
        self._others = LeastLoaded()
        self._taken: dict[str, Assignment] = {}
        self._undecided: dict[str, Any] = {}  # chosen, but not yet taken by their replica

    def order(self, route: Route, others: dict[str, int]) -> list[str]:
        """Replicas, the best first; those to avoid are last. A replica's load is what this process has sent it, and
        what others had when it last reported."""
        self._follow(others)
        own = self._router.loads
        loads = {name: own[name] + tokens for name, tokens in others.items()}
        good = {name: load for name, load in loads.items() if name not in route.avoid}
        policy = self._router.policy if route.tokens else self._others
        return [*policy.order(route.key, route.tokens, good), *(name for name in loads if name not in good)]

    def take(self, request_id: str, name: str, tokens: int, undecided: Any = None) -> None:
        """`undecided` is a pending request of Ray's, which may be cancelled without further notice."""
        self.drop(request_id)
        self._router.join(name)
        self._taken[request_id] = self._router.place(name, tokens)
        if undecided is not None:
            self._undecided[request_id] = undecided

    def drop(self, request_id: str) -> None:
        self._undecided.pop(request_id, None)
        if (assignment := self._taken.pop(request_id, None)) is not None:
            self._router.finish(assignment)

    @property
    def tokens(self) -> dict[str, int]:
        return self._router.loads

    def _follow(self, names: dict[str, int]) -> None:
        for name in self._router.loads.keys() - names.keys():
            self._router.leave(name)
        for name in sorted(names):
            self._router.join(name)
        for request_id in [name for name, pending in self._undecided.items() if pending.future.cancelled()]:
            self.drop(request_id)

"""What a sending process knows about the loads of the replicas."""

from typing import Any

from saccade.ray.ray_messages import Route
from saccade.routing import Assignment, LeastLoaded, Router, make_policy


class Loads:
    """Tokens per replica, and which replica has which request. A request counts as soon as a replica is chosen."""

    def __init__(self, policy: str, room_tokens: int) -> None:
        self._router = Router(make_policy(policy, room_tokens=room_tokens))
        self._others = LeastLoaded()
        self._taken: dict[str, Assignment] = {}
        self._undecided: dict[str, Any] = {}  # assigned, but not yet accepted by the replica

    def order(self, route: Route, others: dict[str, int]) -> list[str]:
        """All replicas, the best first and those to avoid last. A replica's load is what this process sent it plus what
        other senders had there when it last reported (`others`)."""
        self._follow(others)
        own = self._router.loads
        loads = {name: own[name] + tokens for name, tokens in others.items()}
        good = {name: load for name, load in loads.items() if name not in route.avoid}
        policy = self._router.policy if route.tokens else self._others
        return [*policy.order(route.key, route.tokens, good), *(name for name in loads if name not in good)]

    def take(self, request_id: str, name: str, tokens: int, undecided: Any = None) -> None:
        """`undecided` is Ray's pending request. Ray may cancel it without telling the router."""
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

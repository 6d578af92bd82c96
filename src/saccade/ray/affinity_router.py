"""`saccade.routing` behind Ray Serve's interface for request routers. That interface is still alpha, so only this
module depends on it. Every process that sends requests has a router that counts its own requests; the replicas report
those of the other senders."""

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import RequestRouter

from saccade.ray.loads import Loads
from saccade.ray.ray_messages import Route

NO_ROUTE = Route(b"", 0)  # for calls other than requests


class AffinityRouter(RequestRouter):  # type: ignore[misc]
    """Takes a request's route from its keyword argument `route`."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._loads = Loads(kwargs.get("policy", "affinity"), kwargs.get("room_tokens", 0))

    async def choose_replicas(self, candidate_replicas: Sequence[Any], pending_request: Any = None) -> list[list[Any]]:
        """Each replica is its own group, so that the next one is tried only when a replica accepts no more requests."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        route = _route_of(pending_request)
        order = self._loads.order(route, {name: _others(replica, route) for name, replica in by_name.items()})
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        if route.tokens and order:
            self._loads.take(pending_request.metadata.internal_request_id, order[0], route.tokens, pending_request)
        return [[by_name[name]] for name in order]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        route = _route_of(pending_request)
        if route.tokens:
            self._loads.take(pending_request.metadata.internal_request_id, replica_id.unique_id, route.tokens)

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        self._loads.drop(internal_request_id)


def _route_of(pending_request: Any) -> Route:
    return NO_ROUTE if pending_request is None else Route(*pending_request.kwargs.get("route", NO_ROUTE))


def _others(replica: Any, route: Route) -> int:
    """Tokens that a replica had from other front ends when it last reported."""
    reported: dict[str, int] = replica.routing_stats.get("tokens", {})
    return sum(tokens for sender, tokens in reported.items() if sender != route.sender)

"""Which replica a request goes to. Plain data and policy, the same on one machine, on a Ray cluster and in simulations.

`affinity_key` names what a request shares with others: its first image, or how its text begins. A `Policy` orders the
replicas for a key, and a `Router` keeps their loads."""

from saccade.routing.affinity import affinity_key, request_tokens, room_of
from saccade.routing.policies import POLICIES, ConsistentHashing, LeastLoaded, Policy, RoundRobin, make_policy
from saccade.routing.router import Assignment, Router

__all__ = [
    "POLICIES",
    "Assignment",
    "ConsistentHashing",
    "LeastLoaded",
    "Policy",
    "RoundRobin",
    "Router",
    "affinity_key",
    "make_policy",
    "request_tokens",
    "room_of",
]

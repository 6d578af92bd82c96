"""Which replica a request goes to. The same code serves one machine, a Ray cluster and simulations.

`affinity_key` identifies what a request shares with others: its first image, or the beginning of its text. A `Policy`
orders the replicas for a key, and a `Router` keeps their loads."""

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

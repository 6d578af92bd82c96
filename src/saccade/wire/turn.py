"""A request's place in the queue."""

from msgspec import Struct


class Turn(Struct, frozen=True):
    """Lower priorities go first. Within a priority, tenants share in proportion to their weights."""

    priority: int = 0
    tenant: str = ""
    weight: float = 1.0


NEXT = Turn()

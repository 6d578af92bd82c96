"""A request's place among others."""

from msgspec import Struct


class Turn(Struct, frozen=True):
    """Lower priorities go first. Within a priority, tenants share in proportion to their weights."""

    priority: int = 0
    tenant: str = ""
    weight: float = 1.0


NEXT = Turn()


class Terms(Struct, frozen=True):
    """How a request shares the engine with others. `deadline` is a time of `time.monotonic`. Requests with different
    salts share nothing in the caches."""

    turn: Turn = NEXT
    deadline: float | None = None
    cache_salt: str | None = None


USUAL = Terms()

"""When a request has its turn."""

from msgspec import Struct


class Turn(Struct, frozen=True):
    """Lower priorities first; among equal ones, tenants take fair turns in proportion to their weights."""

    priority: int = 0
    tenant: str = ""
    weight: float = 1.0


NEXT = Turn()

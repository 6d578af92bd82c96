"""Settings: frozen, keyword-only, checked once. Facts found at run time live in other types."""

from dataclasses import dataclass
from enum import StrEnum

from saccade.errors import ConfigError


class Mode(StrEnum):
    """How a body is captured: in one graph, or in pieces with calls between them."""

    FULL = "full"
    PIECEWISE = "piecewise"


class Tier(StrEnum):
    """How a batch is run."""

    EXACT = "exact"  # a graph of this very structure: no padding
    CAPACITY = "capacity"  # a graph of a bucket: boundaries are data, rows are padded
    EAGER = "eager"  # no graph, with a reason


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphSettings:
    """What a graph runner may do. With no tier, everything runs eagerly."""

    mode: Mode = Mode.FULL
    tiers: frozenset[Tier] = frozenset({Tier.CAPACITY})
    strict: bool = False  # a fallback is an error
    exact_after: int = 3  # batches of one structure before it is worth a graph of its own
    exact_max_graphs: int = 32
    exact_max_bytes: int = 2 * 2**30

    def __post_init__(self) -> None:
        if Tier.EAGER in self.tiers:
            raise ConfigError("eager is what is left when no graph fits; it is not a tier to switch on")
        for name in ("exact_after", "exact_max_graphs", "exact_max_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """Where the server listens. Only this machine can reach the default address."""

    host: str = "127.0.0.1"
    port: int = 8000

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; allowed are 0..65535 (--port)")

"""What a runner did: counters that are always on, and why a batch was not replayed."""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from saccade.config import Tier
from saccade.graphs.key import GraphKey


class Reason(StrEnum):
    """Why a batch was run the way it was."""

    EXACT_GRAPH = "its structure has a graph of its own"
    FITS_BUCKET = "it fits a bucket"
    GRAPHS_OFF = "graphs are off"
    TOO_LARGE = "it is larger than every bucket"
    NOT_CAPTURED = "no graph is captured for it yet"
    EAGER_FASTER = "a replay measured no faster"
    OUT_OF_SERVICE = "its graph was found wrong and taken out of service"


@dataclass(frozen=True, slots=True)
class Decision:
    """How to run one batch, and why."""

    tier: Tier
    reason: Reason
    key: GraphKey | None = None
    detail: str = ""

    def __str__(self) -> str:
        place = f" [{self.key}]" if self.key else ""
        return f"{self.tier}{place}: {self.reason}" + (f" ({self.detail})" if self.detail else "")


@dataclass(slots=True)
class Stats:
    """Counters of one runner, bounded whatever passes through it. Padded rows are those that replays added."""

    replays: Counter[Tier] = field(default_factory=Counter)
    fallbacks: Counter[Reason] = field(default_factory=Counter)
    real_rows: int = 0
    padded_rows: int = 0
    captures: int = 0
    capture_s: float = 0.0

    def count(self, decision: Decision, real_rows: int, graph_rows: int) -> None:
        if decision.key is None:
            self.fallbacks[decision.reason] += 1
            return
        self.replays[decision.tier] += 1
        self.real_rows += real_rows
        self.padded_rows += graph_rows - real_rows

    @property
    def padding(self) -> float:
        """Padded rows as a share of real ones."""
        return self.padded_rows / self.real_rows if self.real_rows else 0.0

    def snapshot(self) -> dict[str, Any]:
        """Plain data for metrics and pages."""
        return {
            "replays": {tier.value: count for tier, count in self.replays.items()},
            "fallbacks": {reason.name.lower(): count for reason, count in self.fallbacks.items()},
            "real_rows": self.real_rows,
            "padded_rows": self.padded_rows,
            "captures": self.captures,
            "capture_seconds": self.capture_s,
        }

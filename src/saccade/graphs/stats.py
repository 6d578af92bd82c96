"""Counters of what a runner did, always on."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from saccade.choice.key import Decision, Reason
from saccade.config import Tier


@dataclass(slots=True)
class GraphStats:
    """Counters of one runner, of bounded size. Rows are counted in replays only."""

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

    def snapshot(self) -> dict[str, Any]:
        return {
            "replays": {tier.value: count for tier, count in self.replays.items()},
            "fallbacks": {reason.name.lower(): count for reason, count in self.fallbacks.items()},
            "real_rows": self.real_rows,
            "padded_rows": self.padded_rows,
            "captures": self.captures,
            "capture_seconds": self.capture_s,
        }

"""How many replicas a load needs: by tokens, of which a request with images has hundreds of times as many as another,
and by requests, whose number bounds a batch."""

from math import ceil
from typing import Any


class TokenScaling:
    """Ray Serve asks it for the wanted number, and adds bounds and delays of its own."""

    def __init__(self, target_tokens: int, target_requests: int) -> None:
        self._targets = {"tokens": target_tokens, "requests": target_requests}

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """`context` is Ray Serve's AutoscalingContext: it has what replicas recorded, averaged over a while."""
        told = context.aggregated_metrics or {}
        sums = {name: sum((told.get(name) or {}).values()) for name in self._targets}
        return self.wanted(sums), {}

    def wanted(self, load: dict[str, float]) -> int:
        return max([1, *(ceil(load[name] / target) for name, target in self._targets.items())])

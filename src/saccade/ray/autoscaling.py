"""How many replicas a load needs. Tokens count, because a request with images has hundreds of times as many as one
without. Requests count too, because their number limits a batch."""

from math import ceil
from typing import Any


class TokenScaling:
    """Tells Ray Serve how many replicas are wanted. Ray Serve applies its own bounds and delays."""

    def __init__(self, target_tokens: int, target_requests: int) -> None:
        self._targets = {"tokens": target_tokens, "requests": target_requests}

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """`context` is Ray Serve's AutoscalingContext, with the stats that replicas recorded, averaged over time."""
        told = context.aggregated_metrics or {}
        sums = {name: sum((told.get(name) or {}).values()) for name in self._targets}
        return self.wanted(sums), {}

    def wanted(self, load: dict[str, float]) -> int:
        return max([1, *(ceil(load[name] / target) for name, target in self._targets.items())])

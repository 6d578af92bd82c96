"""Layouts of example batches for verification and audit: equal totals with different boundaries, and random ones."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch

from saccade.choice.key import Capacity
from saccade.graphs.phase import Phase

Lengths = tuple[int, ...]
Values = Mapping[str, Any]

MAX_SEGMENTS = 8


def equal_totals(phase: Phase, capacity: Capacity, rng: torch.Generator) -> tuple[Lengths, Lengths]:
    """Two layouts with equally many rows and segments but different boundaries, if there are several segments."""
    total = max(capacity[phase.rows] * 7 // 8, 1)
    segments = max(1, min(num_segments(phase, capacity), total, 3))
    first = compose(total, segments, rng)
    others = (compose(total, segments, rng) for _ in range(100))
    return first, next((other for other in others if other != first), first)


def random_layout(phase: Phase, capacity: Capacity, rng: torch.Generator) -> Lengths:
    total = int(torch.randint(1, capacity[phase.rows] + 1, (), generator=rng))
    segments = int(torch.randint(1, max(2, num_segments(phase, capacity) + 1), (), generator=rng))
    return compose(total, min(segments, total), rng)


def num_segments(phase: Phase, capacity: Capacity) -> int:
    """How many segments to cut a batch into. One is left for padding."""
    return min(capacity[phase.segments] - 1, MAX_SEGMENTS) if phase.segments else 1


def compose(total: int, parts: int, rng: torch.Generator) -> Lengths:
    """Splits a total into random positive parts."""
    parts = max(1, min(parts, total))
    cuts = sorted((torch.randperm(total - 1, generator=rng)[: parts - 1] + 1).tolist()) if total > 1 else []
    edges = [0, *cuts, total]
    return tuple(high - low for low, high in pairwise(edges))

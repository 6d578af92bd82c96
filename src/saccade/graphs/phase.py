"""A phase: a forward pass to replay, and what captures, checks and shadow runs need to know about it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from saccade.choice.key import Capacity
from saccade.choice.shape import PhaseShape
from saccade.errors import ConfigError
from saccade.graphs.arena import Arena
from saccade.graphs.frame import Body

Outputs = Mapping[str, Tensor]
ExampleMaker = Callable[[tuple[int, ...], torch.Generator], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A forward pass to replay: its body, its buffers, its buckets.

    `example` makes a batch with the given segment lengths and random content, for warm-up, capture, timing and
    verification. `typical` is the usual length of a segment: captures and timings then use such segments, so that they
    match real batches. `state` names what the body touches outside the arena: weights, caches. `is_repeatable` says
    that an example's outputs do not depend on earlier passes, because it reads from caches only what it wrote;
    verification then runs it eagerly once. `set_up` puts memory that an example uses outside the arena into a known
    state, and `written` copies what it wrote there, which verification compares like outputs. `writes` names the parts
    of `state` that a pass may change; the audit reports changes of any other. `nondeterministic` names kernels whose
    results vary from run to run: with none, replays must equal eager runs bit for bit, otherwise within an estimated
    error. `volatile_in` and `volatile_out` are views of memory outside the arena that a pass reads and writes, and that
    other passes overwrite: once the former is restored, the pass can be rerun.
    """

    name: str
    body: Body
    arena: Arena
    rows: str  # the dimension by which buckets are ordered and padding is counted
    buckets: tuple[Capacity, ...]
    example: ExampleMaker
    state: Mapping[str, Tensor] = field(default_factory=dict)
    typical: int | None = None
    is_repeatable: bool = False
    set_up: Callable[[Mapping[str, Any]], None] = lambda values: None
    written: Callable[[Mapping[str, Any]], dict[str, Tensor]] = lambda values: {}
    writes: frozenset[str] = frozenset()
    nondeterministic: tuple[str, ...] = ()
    volatile_in: Callable[[Mapping[str, Any]], dict[str, Tensor]] = lambda values: {}
    volatile_out: Callable[[Mapping[str, Any]], dict[str, Tensor]] = lambda values: {}

    def __post_init__(self) -> None:
        for bucket in self.buckets:
            if any(bucket[name] > self.arena.limits[name] for name in self.arena.limits):
                raise ConfigError(f"bucket {bucket} of phase {self.name} is larger than its arena: {self.arena.limits}")

    @property
    def shape(self) -> PhaseShape:
        return PhaseShape(
            name=self.name,
            rows=self.rows,
            buckets=self.buckets,
            limits=self.arena.limits,
            boundaries=self.arena.boundaries,
        )

    @property
    def segments(self) -> str | None:
        """The dimension that counts a batch's segments, if it has any."""
        return self.arena.boundaries[0].count if self.arena.boundaries else None


def copy_out(outputs: Outputs) -> dict[str, Tensor]:
    """A consumer that copies the outputs, so that they outlive the next replay."""
    return {name: output.clone() for name, output in outputs.items()}

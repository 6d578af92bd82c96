"""A phase: a forward pass to be replayed, and what captures, checks and shadow runs need to know of it."""

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
    """A forward pass to be replayed: its body, its buffers, its buckets.

    `example` makes a batch with the given segment lengths and random content; it serves warm-up, capture, timing
    and verification. `state` names what the body touches outside the arena: weights, caches. `typical` is the length
    of an ordinary segment: where it is given, examples consist of such, so that what is measured is what will be run.
    `is_repeatable` says that an example gives the same outputs whatever ran before it, as one does that reads nothing
    from caches but what it wrote itself; verification then needs one eager run of it. `set_up` puts what an example
    needs, or will write, outside the arena into a known state, and `written` copies what it wrote there: verification
    looks at that as at outputs. `writes` names what of `state` a pass may change; the audit finds everything else that
    it changes. `nondeterministic` names the kernels whose results differ from run to run: without any, replays are
    compared with eager runs bit for bit, with some, against an estimated error. `volatile_in` and
    `volatile_out` are views of what a pass with these inputs reads and writes outside the arena, as far as other passes
    overwrite it: with the first put back, the pass can be run again.
    """

    name: str
    body: Body
    arena: Arena
    rows: str  # the dimension that buckets are ordered by and padding is counted in
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
        """What decisions depend on."""
        return PhaseShape(
            name=self.name,
            rows=self.rows,
            buckets=self.buckets,
            limits=self.arena.limits,
            boundaries=self.arena.boundaries,
        )

    @property
    def segments(self) -> str | None:
        """The dimension that counts the segments of a batch, where it has any."""
        return self.arena.boundaries[0].count if self.arena.boundaries else None


def copy_out(outputs: Outputs) -> dict[str, Tensor]:
    """The consumer that just copies: what it returns outlives the next replay."""
    return {name: output.clone() for name, output in outputs.items()}

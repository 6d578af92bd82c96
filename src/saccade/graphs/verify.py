"""Verify: replays against eager runs, in the sequences that break graphs which froze or leaked something."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

import torch
from torch import Tensor

from saccade.config import Tier
from saccade.errors import GraphError
from saccade.graphs.key import Capacity, GraphKey
from saccade.graphs.runner import GraphRunner, copy_out

Lengths = tuple[int, ...]
Values = Mapping[str, Any]
Tensors = dict[str, Tensor]
Known = dict[int, Tensors]
Consume = Callable[[Mapping[str, Tensor]], Tensors]

# Between padded and unpadded shapes, where products add up in another order; a wrong boundary differs by about 1.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
SAME_SHAPE = 0.1  # of that, for runs of the same shapes: they launch the same kernels, and differ by nothing
MAX_SEGMENTS = 8
POISON_EVERY = 4  # batches of the shuffled ones


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence on one graph: how far its results were from eager, as a share of the largest eager value."""

    key: str
    sequence: str
    num_batches: int
    difference: float
    tolerance: float
    problem: str = ""

    @property
    def is_right(self) -> bool:
        return not self.problem and self.difference <= self.tolerance


@dataclass(frozen=True, slots=True)
class Report:
    rows: tuple[Row, ...]

    @property
    def is_right(self) -> bool:
        """Whether something was checked, and all of it was right."""
        return bool(self.rows) and all(row.is_right for row in self.rows)

    def __str__(self) -> str:
        lines = []
        for row in self.rows:
            verdict = "ok" if row.is_right else f"WRONG {row.problem}".rstrip()
            lines.append(
                f"{row.key:<48} {row.sequence:<20} {row.num_batches:>4} {row.difference:>10.2e} "
                f"(allowed {row.tolerance:.0e})  {verdict}"
            )
        return "\n".join(lines)


def verify(
    runner: GraphRunner,
    *,
    consume: Consume = copy_out,
    seed: int = 0,
    buckets: Sequence[Capacity] | None = None,
    same_shape: bool = False,
    on_graph: Callable[[], None] = lambda: None,
) -> Report:
    """Run the adversarial sequences on captured buckets, all or those given, and, where the exact tier is on, on exact
    graphs. A replay costs as much as its bucket is large, whatever is in it: so every batch serves several sequences.

    `consume` is how results are taken out of the buffers: what it keeps must survive later replays. With `same_shape`
    the eager runs are padded as the replays are, and must give the same numbers but for a tenth of the tolerance.
    `on_graph` is called after each graph.
    """
    rng = torch.Generator().manual_seed(seed)
    rows: list[Row] = []
    keys = [graph.key for graph in runner.graphs if not graph.key.digest]
    keys = [key for key in keys if buckets is None or key.capacity in buckets]
    for key in keys:
        known: Known | None = {} if runner.phase.is_repeatable else None
        for name, batches in _sequences(runner, key.capacity, rng).items():
            rows.append(verify_batches(runner, key, name, batches, consume=consume, same_shape=same_shape, known=known))
        on_graph()
    if rows:
        rows.append(_verify_across(runner, keys, consume, rng, same_shape=same_shape))
    if Tier.EXACT in runner.settings.tiers:
        smallest = min(buckets or runner.phase.buckets, key=lambda bucket: bucket[runner.phase.rows])
        rows.append(_verify_exact(runner, smallest, consume, rng))
    return Report(tuple(rows))


def verify_batches(
    runner: GraphRunner,
    key: GraphKey,
    name: str,
    batches: Sequence[Values],
    *,
    consume: Consume = copy_out,
    same_shape: bool = False,
    known: Known | None = None,
) -> Row:
    """Replay one graph on batches that fit it, in order. A name that begins with "poisoned" has everything that is not
    a valid row filled with NaN before each. `known` keeps the eager results of batches that come again."""
    poison = name.startswith("poisoned")

    def replay(values: Values) -> Tensors:
        if poison:
            _poison(runner, key)
        runner.phase.set_up(values)
        return runner.replay(key, runner.phase.arena.admit(values), consume, poison=poison)

    return _compare(runner, str(key), name, batches, replay, at=key.capacity, same_shape=same_shape, known=known)


def _verify_across(
    runner: GraphRunner, keys: Sequence[GraphKey], consume: Consume, rng: torch.Generator, *, same_shape: bool
) -> Row:
    """Random layouts through all buckets, which share one pool: none may see what another left there."""
    layouts = [_random_layout(runner, key.capacity, rng) for key in keys]
    order = torch.randperm(len(layouts), generator=rng).tolist()
    batches = [runner.phase.example(layouts[i], rng) for i in order]
    turns = count()

    def run(values: Values) -> Tensors:
        if next(turns) % POISON_EVERY == 0:
            _poison(runner, keys[int(torch.randint(len(keys), (), generator=rng))])
        runner.phase.set_up(values)
        return runner.run(values, consume)

    gate, runner.gate = runner.gate, None
    try:
        name = f"{runner.phase.name}/{runner.settings.mode} all buckets"
        return _compare(runner, name, "shuffled", batches, run, same_shape=same_shape)
    finally:
        runner.gate = gate


def _verify_exact(runner: GraphRunner, capacity: Capacity, consume: Consume, rng: torch.Generator) -> Row:
    """Two structures of the same sizes, through the runner's own choice: neither may get the other's graph."""
    one, other = _equal_totals(runner, capacity, rng)
    name = f"{runner.phase.name}/{runner.settings.mode} exact"

    def run(values: Values) -> Tensors:
        runner.phase.set_up(values)
        return runner.run(values, consume)

    gate, runner.gate = runner.gate, None
    try:
        runner.capture_exact(runner.phase.example(one, rng))
        replays_before = _num_exact_replays(runner)
        lengths = (one, other, one, other)
        row = _compare(runner, name, "equal totals", [runner.phase.example(part, rng) for part in lengths], run)
    finally:
        runner.gate = gate
    if _num_exact_replays(runner) == replays_before:
        return Row(row.key, row.sequence, 0, row.difference, row.tolerance, "no exact graph was replayed")
    return row


def _num_exact_replays(runner: GraphRunner) -> int:
    return runner.stats.replays[Tier.EXACT]


def _compare(
    runner: GraphRunner,
    key: str,
    name: str,
    batches: Sequence[Values],
    run: Callable[[Values], Tensors],
    *,
    at: Capacity | None = None,
    same_shape: bool = False,
    known: Known | None = None,
) -> Row:
    """Run a sequence; compare each result with eager at once, and again when all later replays are done."""
    kept: list[tuple[Tensors, Tensors]] = []
    worst, tolerance = 0.0, 0.0
    try:
        for values in batches:
            expected = known.get(id(values)) if known is not None else None
            if expected is None:
                expected = _expected(runner, values, at, same_shape=same_shape)
            if known is not None:
                known[id(values)] = expected
            actual = {**run(values), **runner.phase.written(values)}
            kept.append((actual, expected))
            worst = max(worst, _difference(actual, expected))
            tolerance = max(TOLERANCES.get(t.dtype, 0.0) for t in expected.values())
        tolerance *= SAME_SHAPE if same_shape else 1.0
        worst_kept = max((_difference(actual, expected) for actual, expected in kept), default=0.0)
    except GraphError as error:
        return Row(key, name, len(kept), float("inf"), tolerance, str(error))
    problem = "a result changed after it was handed over" if worst_kept > max(worst, tolerance) else ""
    return Row(key, name, len(batches), max(worst, worst_kept), tolerance, problem)


def _expected(runner: GraphRunner, values: Values, at: Capacity | None, *, same_shape: bool) -> Tensors:
    """Numbers from an unpadded run; choices (tokens) from one of the same shapes, as rounding decides near a tie."""
    bucket = at or runner.bucket_for(runner.phase.arena.admit(values).sizes)
    if same_shape:
        return _eager(runner, values, bucket)
    expected = _eager(runner, values, None)
    if all(output.is_floating_point() for output in expected.values()):
        return expected
    padded = _eager(runner, values, bucket)
    return {name: out if out.is_floating_point() else padded[name] for name, out in expected.items()}


def _eager(runner: GraphRunner, values: Values, at: Capacity | None) -> Tensors:
    """What a batch puts out and what it writes elsewhere."""
    runner.phase.set_up(values)
    return {**runner.eager(values, copy_out, at=at), **runner.phase.written(values)}


def _difference(actual: Tensors, expected: Tensors) -> float:
    """The largest difference as a share of the largest expected value; infinite where something is not a number."""
    worst = 0.0
    for name, right in expected.items():
        if right.numel() == 0:
            continue
        difference = (actual[name].double() - right.double()).abs().max()
        share = (difference / right.double().abs().max().clamp_min(1e-30)).item()
        worst = max(worst, share if share == share else float("inf"))
    return worst


def _poison(runner: GraphRunner, key: GraphKey) -> None:
    """Replay on nothing but NaN and no valid row: every temporary of the graph is NaN before the next replay."""
    arena = runner.phase.arena
    arena.poison(key.capacity)
    empty = arena.empty_batch()
    runner.replay(key, empty, lambda outputs: None, poison=True)


def _sequences(runner: GraphRunner, capacity: Capacity, rng: torch.Generator) -> dict[str, list[Values]]:
    """An example may make more of a dimension than a bucket holds (windows of a segment, say): that one is left out."""
    one, other = _equal_totals(runner, capacity, rng)
    full = _compose(capacity[runner.phase.rows], _num_segments(runner, capacity), rng)
    made = {lengths: runner.phase.example(lengths, rng) for lengths in (one, other, (1,), full)}
    arena = runner.phase.arena
    fitting = {part for part, values in made.items() if arena.misfit(arena.admit(values).sizes, capacity) is None}
    sequences = {
        "equal totals": [one, other, one],
        "small-large-small": [(1,), full, (1,)],
        "poisoned": [other],
    }
    return {name: [made[part] for part in parts if part in fitting] for name, parts in sequences.items()}


def _num_segments(runner: GraphRunner, capacity: Capacity) -> int:
    """Segments to cut a batch into, so that one is left for the padding."""
    dimension = runner.phase.segments
    return min(capacity[dimension] - 1, MAX_SEGMENTS) if dimension else 1


def _equal_totals(runner: GraphRunner, capacity: Capacity, rng: torch.Generator) -> tuple[Lengths, Lengths]:
    """Layouts with the same number of rows and segments and, where there are two or more, other boundaries."""
    total = max(capacity[runner.phase.rows] * 7 // 8, 1)
    segments = max(1, min(_num_segments(runner, capacity), total, 3))
    first = _compose(total, segments, rng)
    others = (_compose(total, segments, rng) for _ in range(100))
    return first, next((other for other in others if other != first), first)


def _random_layout(runner: GraphRunner, capacity: Capacity, rng: torch.Generator) -> Lengths:
    total = int(torch.randint(1, capacity[runner.phase.rows] + 1, (), generator=rng))
    segments = int(torch.randint(1, max(2, _num_segments(runner, capacity) + 1), (), generator=rng))
    return _compose(total, min(segments, total), rng)


def _compose(total: int, parts: int, rng: torch.Generator) -> Lengths:
    """A random way to write a total as a sum of positive parts."""
    parts = max(1, min(parts, total))
    cuts = sorted((torch.randperm(total - 1, generator=rng)[: parts - 1] + 1).tolist()) if total > 1 else []
    edges = [0, *cuts, total]
    return tuple(high - low for low, high in pairwise(edges))

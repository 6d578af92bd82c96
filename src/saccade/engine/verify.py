"""Every graph of an engine against eager runs, in the sequences that break graphs which froze or leaked something.

Replays are compared with eager runs of the same padded shapes, which launch the same kernels: what differs then is not
rounding. The short form takes a sample that runs in a second or two and is part of the start; the long one takes all.
It writes to caches and must not run while requests do.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from saccade.engine.encoder import Encoder
from saccade.engine.engine import Engine
from saccade.engine.vision import vision_values
from saccade.errors import GraphError
from saccade.graphs import Capacity, GraphRunner, Report, Row, verify, verify_batches
from saccade.graphs.stats import Stats
from saccade.models.geometry import Grid

Progress = Callable[[str], None]

SHORT_SEQUENCES = ("equal totals", "A-B-A", "poisoned")
SHORT_ROWS = {"vision": 400, "prefill": 512, "decode": 64, "head": 64, "sample": 64}  # the largest bucket of a sample
NUM_SHORT_BUCKETS = 2


def verify_engine(engine: Engine, *, is_short: bool = False, progress: Progress = lambda text: None) -> Report:
    """A row for every phase, bucket and sequence. An engine without graphs has none."""
    assert not engine.has_work, "requests run; verification writes where they read"
    rows: list[Row] = []
    for runner in engine.runner.phases:
        if not runner.graphs:
            continue
        progress(runner.phase.name)
        encoder = engine.runner.encoder
        with _unseen(runner):
            if encoder is not None and runner is encoder.graphs:
                with encoder.alone():
                    found = [*_verify(runner, is_short=is_short), *_verify_grids(encoder, is_short=is_short)]
            else:
                found = [*_verify(runner, is_short=is_short)]
        runner.selfcheck = max((row.difference for row in found), default=None)
        rows += found
    return Report(tuple(rows))


def check_engine(engine: Engine, *, is_short: bool = True, progress: Progress = lambda text: None) -> Report:
    """Verify; raises where a replay is not what an eager run is."""
    report = verify_engine(engine, is_short=is_short, progress=progress)
    wrong = [row for row in report.rows if not row.is_right]
    if wrong:
        first = wrong[0]
        raise GraphError(
            f"graph [{first.key}] differs from an eager run by {first.difference:.1e} of the largest value in sequence "
            f"{first.sequence!r} (allowed {first.tolerance:.0e}) {first.problem}; {len(wrong)} of {len(report.rows)} "
            "checks failed. Not serving: run `saccade verify`, or turn the phase's graphs off (--graphs)"
        )
    return report


def _verify(runner: GraphRunner, *, is_short: bool) -> tuple[Row, ...]:
    if not is_short:
        return verify(runner, same_shape=True).rows
    return verify(runner, buckets=sample(runner), sequences=SHORT_SEQUENCES, same_shape=True).rows


def sample(runner: GraphRunner) -> list[Capacity]:
    """The smallest bucket and the largest that is still quick to run."""
    rows = runner.phase.rows
    captured = [graph.key.capacity for graph in runner.graphs if not graph.key.digest]
    ordered = sorted(captured, key=lambda bucket: (bucket[rows], sum(bucket.values())))
    quick = [bucket for bucket in ordered if bucket[rows] <= SHORT_ROWS.get(runner.phase.name, 64)] or ordered[:1]
    return [quick[0], *quick[-1:]][-NUM_SHORT_BUCKETS:]


def _verify_grids(encoder: Encoder, *, is_short: bool) -> Iterator[Row]:
    """Equal rows and frames, but other heights and widths (so other positions and windows); videos; images twice."""
    runner = encoder.graphs
    rng = torch.Generator().manual_seed(1)
    chosen = sample(runner) if is_short else [graph.key.capacity for graph in runner.graphs if not graph.key.digest]
    for graph in runner.graphs:
        if graph.key.digest or graph.key.capacity not in chosen:
            continue
        for name, sequence in _grid_sequences(encoder, graph.key.capacity).items():
            batches = [_batch(encoder, grids, rng) for grids in sequence]
            arena = runner.phase.arena
            batches = [b for b in batches if arena.misfit(arena.admit(b).sizes, graph.key.capacity) is None]
            if batches:
                yield verify_batches(runner, graph.key, name, batches, same_shape=True)


def _grid_sequences(encoder: Encoder, capacity: Capacity) -> dict[str, list[list[Grid]]]:
    side = encoder.spec.merge
    area = max(capacity["units"] * 3 // 4, 1)
    short = max(int(area**0.5) // 2, 1)
    long = max(area // short, 1)
    tall, wide = (1, long * side, short * side), (1, short * side, long * side)
    frames = max(min(capacity["frames"] - 1, 3), 1)
    rest = max(area // frames // short, 1)
    video, turned = (frames, short * side, rest * side), (frames, rest * side, short * side)
    small = (1, side, max(short // 2, 1) * side)
    return {
        "other shapes": [[tall], [wide], [tall]],
        "poisoned shapes": [[wide], [small], [tall]],
        "videos": [[video], [turned], [video]],
        "the same image twice": [[small, small], [small], [small, small]],
    }


def _batch(encoder: Encoder, grids: list[Grid], rng: torch.Generator) -> dict[str, Any]:
    """Random patches; images of one grid get the same ones."""
    unit = encoder.spec.unit
    units = [frames * rows * columns // unit for frames, rows, columns in grids]
    made = encoder.graphs.phase.example((sum(units),), rng)
    patches, start = made["patches"], 0
    seen: dict[Grid, Any] = {}
    for grid, count in zip(grids, units, strict=True):
        stop = start + count * unit
        if grid in seen:
            patches[start:stop] = seen[grid]
        seen[grid] = patches[start:stop].clone()
        start = stop
    return vision_values(encoder.spec, grids, patches, made["targets"])


@contextmanager
def _unseen(runner: GraphRunner) -> Iterator[None]:
    """What verification replays and captures is not counted, and nothing of it stays."""
    stats, runner.stats = runner.stats, Stats()
    replays = {graph.key: graph.num_replays for graph in runner.graphs}
    try:
        yield
    finally:
        runner.stats = stats
        runner.forget_exact()
        for graph in runner.graphs:
            graph.num_replays = replays.get(graph.key, 0)

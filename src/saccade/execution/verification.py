"""Verifies an executor's graphs against eager runs, in sequences that expose a graph which froze or leaked something,
and audits what graphs froze.

Replays are compared bit for bit with eager runs of the same padded shapes, which launch the same kernels. The short
form is part of start-up: it checks a sample of the graphs in a second or two. The long form checks all of them. Both
write to caches, so neither may run while requests do.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from saccade.errors import GraphError
from saccade.execution.executor import DeviceExecutor
from saccade.execution.vision_encoder import Encoder
from saccade.graphs import (
    Anywhere,
    AuditReport,
    AuditRow,
    Capacity,
    GraphRunner,
    Known,
    Values,
    Verifier,
    VerifyReport,
    VerifyRow,
    audit,
    verify,
)
from saccade.graphs.cuda_nodes import UnreadableError
from saccade.graphs.node_differences import PERHAPS
from saccade.graphs.stats import GraphStats
from saccade.layers.parallel import ALONE, ParallelGroup
from saccade.scheduling.geometries import Grid, vision_values

log = logging.getLogger(__name__)

OnGraph = Callable[[str, int, int], None]
Grids = tuple[Grid, ...]

SHORT_ROWS = {"vision": 400, "prefill": 512, "decode": 64, "head": 64, "sample": 64}  # largest bucket in a sample


def verify_graphs(
    executor: DeviceExecutor,
    *,
    is_short: bool = False,
    progress: OnGraph = lambda *news: None,
    group: ParallelGroup = ALONE,
) -> VerifyReport:
    """Returns a row for every phase, bucket and sequence, or none without graphs. `progress(phase, done, total)` is
    called before the first graph and after each. All ranks of the group call it together; each has its own report."""
    rows: list[VerifyRow] = []

    def on_any_rank(found: bool) -> bool:
        return group.agree(-int(found)) < 0

    anywhere: Anywhere = bool if group.size == 1 else on_any_rank
    count = _GraphCount(executor, is_short, progress)
    for runner in executor.phases:
        if not runner.settings.tiers:
            continue
        count.enter(runner.phase.name)
        encoder = executor.encoder
        with _uncounted(runner):
            chosen = chosen_buckets(runner, is_short=is_short)
            report = verify(runner, buckets=chosen, same_shape=True, on_graph=count.one, anywhere=anywhere)
            found = [*report.rows]
            if encoder is not None and runner is encoder.graphs:
                verifier = Verifier(runner, same_shape=True, anywhere=anywhere)
                found += _verify_grids(encoder, count, chosen, verifier)
                found += _verify_parts(executor, verifier, is_short=is_short)
        runner.selfcheck = max((row.difference for row in found), default=None)
        rows += found
    return VerifyReport(tuple(rows))


class _GraphCount:
    """Counts finished graphs. Verification runs vision graphs `twice`, on generic rows and on images and videos."""

    def __init__(self, executor: DeviceExecutor, is_short: bool, progress: OnGraph, *, twice: bool = True) -> None:
        self._progress = progress
        self._phase, self._done, self._total = "", 0, 0
        for runner in executor.phases:
            self._total += len(chosen_buckets(runner, is_short=is_short)) * (
                2 if twice and runner is executor.vision else 1
            )

    def enter(self, phase: str) -> None:
        self._phase = phase
        self._progress(phase, self._done, self._total)

    def one(self) -> None:
        self._done += 1
        self._progress(self._phase, self._done, self._total)


def check_graphs(executor: DeviceExecutor, *, is_short: bool = True, group: ParallelGroup = ALONE) -> VerifyReport:
    """Verifies and audits; raises if a replay differs from an eager run. Ranks run it in lockstep and fail together."""
    report = verify_graphs(executor, is_short=is_short, group=group)
    _require(group, _describe_wrong(report))
    found = _findings(executor, is_short)
    _require(group, _describe_faults(found))
    for key, finding in found:
        log.warning("the audit of graph [%s] found: %s; `saccade audit` looks at all graphs", key, finding)
    return report


def _require(group: ParallelGroup, problem: str) -> None:
    """Raises on all ranks if any has a problem. An error before a sum shows on every rank."""
    problems = [each.decode() for each in group.gather(problem.encode())]
    ranks = [rank for rank, each in enumerate(problems) if each]
    if not ranks:
        return
    who = "" if group.size == 1 else f"on rank {', '.join(map(str, ranks))} of {group.size}: "
    raise GraphError(f"{who}{problems[ranks[0]]}. {NOT_SERVING}")


def _describe_wrong(report: VerifyReport) -> str:
    wrong = [row for row in report.rows if not row.is_right]
    if not wrong:
        return ""
    first = wrong[0]
    return (
        f"graph [{first.key}] differs from an eager run in sequence {first.sequence!r}: {first.problem}; "
        f"{len(wrong)} of {len(report.rows)} checks failed"
    )


def _describe_faults(found: list[tuple[str, str]]) -> str:
    sure = [(key, finding) for key, finding in found if not finding.startswith(PERHAPS)]
    if not sure:
        return ""
    key, finding = sure[0]
    return f"the audit of graph [{key}] found {len(sure)} faults: {finding}"


def _findings(executor: DeviceExecutor, is_short: bool) -> list[tuple[str, str]]:
    """Audit findings, each with its graph's key; none if the driver cannot list a graph's nodes."""
    try:
        report = audit_graphs(executor, is_short=is_short)
    except UnreadableError as error:
        log.warning("graphs were compared with eager runs, but not audited: %s", error)
        return []
    return [(row.key, finding) for row in report.rows for finding in row.findings]


NOT_SERVING = "Not serving: run `saccade verify`, or turn the phase's graphs off (--graphs)"


def audit_graphs(
    executor: DeviceExecutor, *, is_short: bool = False, progress: OnGraph = lambda *news: None
) -> AuditReport:
    """Finds what graphs froze: a row per bucket, and per phase one for a replay and one for the exact tier."""
    rows: list[AuditRow] = []
    count = _GraphCount(executor, is_short, progress, twice=False)
    for runner in executor.phases:
        if not runner.settings.tiers:
            continue
        count.enter(runner.phase.name)
        with _uncounted(runner):
            rows += audit(runner, buckets=chosen_buckets(runner, is_short=is_short), on_graph=count.one).rows
    return AuditReport(tuple(rows))


def chosen_buckets(runner: GraphRunner, *, is_short: bool) -> list[Capacity]:
    """All captured buckets, or in the short form the smallest and the largest that is still quick."""
    rows = runner.phase.rows
    captured = [graph.key.capacity for graph in runner.graphs if not graph.key.digest]
    if not is_short or not captured:
        return captured
    ordered = sorted(captured, key=lambda bucket: (bucket[rows], sum(bucket.values())))
    quick = [bucket for bucket in ordered if bucket[rows] <= SHORT_ROWS.get(runner.phase.name, 64)] or ordered[:1]
    return list(dict.fromkeys((quick[0], quick[-1])))


def _verify_grids(
    encoder: Encoder, count: _GraphCount, chosen: Sequence[Capacity], verifier: Verifier
) -> Iterator[VerifyRow]:
    """Compares images of equal rows but other heights and widths (positions, windows), videos and repeated images."""
    runner = encoder.graphs
    rng = torch.Generator().manual_seed(1)
    for graph in runner.graphs:
        if graph.key.digest or graph.key.capacity not in chosen:
            continue
        known: Known | None = {} if runner.phase.is_repeatable else None
        made: dict[Grids, Values] = {}
        for name, sequence in _grid_sequences(encoder, graph.key.capacity).items():
            made |= {grids: _batch(encoder, grids, rng) for grids in sequence if grids not in made}
            arena = runner.phase.arena
            batches = [made[grids] for grids in sequence]
            batches = [b for b in batches if arena.misfit(arena.admit(b).sizes, graph.key.capacity) is None]
            if batches:
                yield verifier.replays(graph.key, name, batches, known=known)
        count.one()


def _verify_parts(executor: DeviceExecutor, verifier: Verifier, *, is_short: bool) -> Iterator[VerifyRow]:
    """Replays graphs in parts, with a language pass after each; in the short form only the smallest of them."""
    runner = verifier.runner
    graphs = sorted(
        (graph for graph in runner.graphs if graph.num_parts > 1 and not graph.key.digest),
        key=lambda graph: graph.key.capacity[runner.phase.rows],
    )
    values = executor.prefill.example_values(executor.prefill.catalogue.shape.ordered[0])

    def run_language() -> None:
        executor.prefill.run(values, lambda outputs: None)

    for graph in graphs[: 1 if is_short else None]:
        batches = [runner.example_values(graph.key.capacity)]
        with _uncounted(executor.prefill):
            yield verifier.in_parts(graph.key, batches, run_language)


def _grid_sequences(encoder: Encoder, capacity: Capacity) -> dict[str, list[Grids]]:
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
        "other shapes": [(tall,), (wide,), (tall,)],
        "poisoned shapes": [(small,), (wide,)],
        "videos": [(video,), (turned,)],
        "the same image twice": [(small, small), (small,)],
    }


def _batch(encoder: Encoder, grids: Grids, rng: torch.Generator) -> dict[str, Any]:
    """Random patches. Images with the same grid get the same patches."""
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
    return vision_values(encoder.spec, list(grids), patches, made["targets"])


@contextmanager
def _uncounted(runner: GraphRunner) -> Iterator[None]:
    """Keeps the replays and captures in its context out of the statistics. Drops exact graphs afterwards, and before:
    only rank 0 knows which it has, but all ranks must choose alike."""
    runner.forget_exact()
    stats, runner.stats = runner.stats, GraphStats()
    replays = {graph.key: graph.num_replays for graph in runner.graphs}
    try:
        yield
    finally:
        runner.stats = stats
        runner.forget_exact()
        for graph in runner.graphs:
            graph.num_replays = replays.get(graph.key, 0)

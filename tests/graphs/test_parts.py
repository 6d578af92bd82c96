"""Graphs that are replayed in parts, while other graphs run in between."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from saccade.choice.key import Decision
from saccade.config import GraphSettings, Mode
from saccade.errors import AddressError, GraphError
from saccade.graphs import Batch, GraphKey, GraphRunner, Verifier, audit, copy_out, verify
from tests.graphs import toy

LENGTHS = (4, 6, 8)


def make_runner(mode: Mode = Mode.FULL, **phase: Any) -> GraphRunner:
    return toy.make_runner(GraphSettings(mode=mode), encoder=toy.Encoder(has_parts=True), **phase)


class InParts:
    """Replays a batch in parts."""

    def __init__(self, runner: GraphRunner, *lengths: int) -> None:
        self.runner, self.results = runner, list[Tensor]()
        self.values = toy.batch(*(lengths or LENGTHS))
        self.decision: Decision = runner.decide(runner.phase.arena.admit(self.values))
        runner.begin(self.decision, self.values, lambda outputs: self.results.append(outputs["y"].clone()))

    def advance(self, end: int, num_parts: int = toy.LAYERS) -> None:
        self.runner.advance(self.decision.key, end, num_parts)

    def assert_right(self) -> None:
        [result] = self.results
        whole = self.runner.run(self.values, copy_out)["y"]
        assert torch.equal(result, whole)
        torch.testing.assert_close(result, toy.alone(self.runner, self.values), rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("ends", [(1, 2, 3), (2, 3), (1, 3), (3,)])
def test_a_graph_in_parts_gives_the_bits_of_the_whole(mode: Mode, ends: tuple[int, ...]) -> None:
    runs = InParts(make_runner(mode))
    for end in ends:
        assert not runs.results, "it is handed over after the last part"
        runs.advance(end)
    runs.assert_right()


def test_graphs_of_other_lanes_may_run_between_parts() -> None:
    runs, other = InParts(make_runner()), make_runner()
    for end in (1, 2, 3):
        runs.advance(end)
        other.run({**toy.batch(16, 16), "x": torch.full((32, toy.WIDTH), torch.nan)}, copy_out)
    runs.assert_right()


@pytest.mark.parametrize("way", ["run", "eager", "capture", "another phase of the lane"])
def test_parts_are_refused_once_their_memory_was_used(way: str) -> None:
    runner = make_runner()
    neighbour = GraphRunner(toy.make_phase(), lane=runner.lane)
    neighbour.capture_buckets()
    runs = InParts(runner)
    runs.advance(1)
    values = toy.batch(5, 5, 8, seed=1)
    if way == "run":
        runner.run(values, copy_out)
    elif way == "eager":
        runner.eager(values, copy_out)
    elif way == "capture":
        runner.capture_buckets()
    else:
        neighbour.run(values, copy_out)
    with pytest.raises(GraphError, match="is unfinished, or its memory was used since"):
        runs.advance(2)
    again = InParts(runner)
    again.advance(3)
    again.assert_right()


def test_without_that_refusal_parts_would_go_on_with_numbers_of_another_batch() -> None:
    runner = make_runner()
    runs = InParts(runner)
    runs.advance(1)
    runner.run(toy.batch(5, 5, 8, seed=1), copy_out)
    assert runner._begun is not None
    runner._begun.num_uses = runner.lane.num_uses
    runs.advance(3)
    with pytest.raises(AssertionError):
        runs.assert_right()


@pytest.mark.parametrize(
    ("end", "num_parts"), [(1, 3), (4, 3), (0, 3), (2, 4), (4, 4), (1, 1)], ids=lambda number: str(number)
)
def test_parts_out_of_order_or_of_another_division_are_refused(end: int, num_parts: int) -> None:
    runs = InParts(make_runner())
    runs.advance(1)
    with pytest.raises(GraphError, match=f"has 3 parts, of which 1 are done; it cannot go on to part {end}"):
        runs.advance(end, num_parts)
    with pytest.raises(GraphError, match="is unfinished"):
        runs.advance(2)
    assert not runs.results


def test_parts_of_a_batch_that_was_not_begun_are_refused() -> None:
    runner = make_runner()
    key = InParts(runner).decision.key
    other = next(graph.key for graph in runner.graphs if graph.key != key)
    with pytest.raises(GraphError, match=r"no pass in graph \[toy/full segments=4 tokens=16\] is unfinished"):
        runner.advance(other, 1, 3)
    with pytest.raises(GraphError, match="is unfinished"):
        runner.advance(key, 1, 3)


def test_a_buffer_that_moves_between_parts_is_noticed() -> None:
    runner = make_runner()
    runs = InParts(runner)
    runs.advance(1)
    runner.phase.arena._storages["x"] = runner.phase.arena._storages["x"].clone()
    with pytest.raises(AddressError, match="'x' was at"):
        runs.advance(2)


def test_parts_count_as_one_replay_and_are_observed_once() -> None:
    class Seen:
        def __init__(self) -> None:
            self.events: list[str] = []

        def before(self, batch: Batch, key: GraphKey | None) -> None:
            self.events.append(f"before {key}")

        def after(self, outputs: Mapping[str, Tensor]) -> None:
            self.events.append(f"after {tuple(outputs['y'].shape)}")

    runner, seen = make_runner(), Seen()
    runner.observer = seen
    runs = InParts(runner)
    for end in (1, 2, 3):
        runs.advance(end)
        assert runner.last == f"toy/full segments=6 tokens=32 to part {end}/3"
    assert seen.events == ["before toy/full segments=6 tokens=32", "after (18, 32)"]
    assert sum(graph.num_replays for graph in runner.graphs) == runner.stats.replays.total() == 1


def test_an_eager_run_goes_through_cuts() -> None:
    runner, values = make_runner(), toy.batch(*LENGTHS)
    cut, uncut = (one.eager(values, copy_out)["y"] for one in (runner, toy.make_runner()))
    assert torch.equal(cut, uncut)


@pytest.mark.parametrize("mode", Mode)
def test_graphs_with_parts_are_verified_and_audited_like_others(mode: Mode) -> None:
    runner = make_runner(mode)
    assert all(graph.num_parts == toy.LAYERS for graph in runner.graphs)
    for report in (verify(runner, seed=7), audit(runner, seed=7)):
        assert report.is_right, str(report)


def test_verification_in_parts_notices_what_disturbs_them() -> None:
    """The buffer that the toy shares between its layers is overwritten between two parts."""
    runner = make_runner(Mode.PIECEWISE)
    graph = runner.graphs[0]
    batches = [runner.example_values(graph.key.capacity)]
    quiet = Verifier(runner).in_parts(graph.key, batches, lambda: None)
    assert quiet.is_right, quiet

    def disturb() -> None:
        runner.phase.arena._storages["x"].zero_()
        for storage in runner.lane._pool.storages:  # type: ignore[union-attr]
            torch.empty(0).set_(storage).zero_()

    disturbed = Verifier(runner).in_parts(graph.key, batches, disturb)
    assert not disturbed.is_right

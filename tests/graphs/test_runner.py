import gc
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Barrier
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from saccade.choice.costs import Curve, TierCosts, measure
from saccade.choice.exact import ExactLayout
from saccade.choice.key import Reason
from saccade.config import GraphSettings, Mode, Tier
from saccade.errors import ConfigError, GraphError
from saccade.graphs import Batch, Capacity, GraphKey, GraphRunner, copy_out
from saccade.graphs.capture import CapturedGraph
from saccade.graphs.phase import Outputs
from tests.graphs import toy

BOTH = frozenset({Tier.CAPACITY, Tier.EXACT})


@pytest.mark.parametrize("mode", Mode)
def test_one_graph_is_right_for_equal_totals_with_different_boundaries(mode: Mode) -> None:
    """sglang#16902: [4, 6, 8] and [5, 5, 8] have the same total and must not share frozen boundaries."""
    runner = toy.make_runner(GraphSettings(mode=mode))
    for lengths in ((4, 6, 8), (5, 5, 8), (4, 6, 8), (18,), (6, 6, 6)):
        values = toy.batch(*lengths)
        result = runner.run(values, copy_out)["y"]
        torch.testing.assert_close(result, toy.alone(runner, values), rtol=0, atol=1e-5)
    assert runner.stats.fallbacks.total() == 0
    assert {str(graph.key): graph.num_replays for graph in runner.graphs}[f"toy/{mode} segments=6 tokens=32"] == 5


def test_the_smallest_bucket_that_holds_a_batch_is_chosen() -> None:
    runner = toy.make_runner(buckets=((8, 3), (16, 3), (24, 6)))

    def chosen(*lengths: int) -> str:
        return str(runner.decide(runner.phase.arena.admit(toy.batch(*lengths))).key)

    assert chosen(8) == "toy/full segments=3 tokens=8"
    assert chosen(9) == "toy/full segments=3 tokens=16"
    assert chosen(2, 2, 4) == "toy/full segments=3 tokens=8", "full: no segment is needed for padding"
    assert chosen(2, 2, 3) == "toy/full segments=6 tokens=24", "three segments and the padding make four"


def test_rows_and_padding_are_counted() -> None:
    runner = toy.make_runner(buckets=((16, 4),))
    runner.run(toy.batch(4, 6), copy_out)
    runner.run(toy.batch(16), copy_out)
    assert (runner.stats.real_rows, runner.stats.padded_rows) == (26, 6)
    snapshot = json.loads(json.dumps(runner.snapshot()))
    assert snapshot["replays"] == {"capacity": 2}
    [graph] = snapshot["graphs"]
    assert graph["key"] == "toy/full segments=4 tokens=16"
    assert graph["replays"] == 2
    assert graph["bytes"] > 0
    assert graph["capture_seconds"] > 0


def test_a_batch_larger_than_every_bucket_runs_eagerly_with_a_reason() -> None:
    runner = toy.make_runner()
    values = toy.batch(30, 30)
    result = runner.run(values, copy_out)["y"]
    torch.testing.assert_close(result, toy.alone(toy.make_runner(buckets=((64, 4),)), values), rtol=0, atol=1e-5)
    assert runner.stats.fallbacks == {Reason.TOO_LARGE: 1}
    decision = runner.decide(runner.phase.arena.admit(values))
    assert str(decision) == "eager: it is larger than every bucket (tokens: 60 > 32)"


def test_too_many_segments_run_eagerly_with_a_reason() -> None:
    runner = toy.make_runner()
    runner.run(toy.batch(*[2] * 9), copy_out)
    assert runner.stats.fallbacks == {Reason.TOO_LARGE: 1}


def test_with_graphs_off_everything_is_eager_and_says_so() -> None:
    runner = toy.make_runner(GraphSettings(tiers=frozenset()))
    runner.run(toy.batch(5), copy_out)
    assert runner.graphs == ()
    assert runner.stats.fallbacks == {Reason.GRAPHS_OFF: 1}


@pytest.mark.parametrize("mode", Mode)
def test_switching_graphs_off_changes_no_bit(mode: Mode) -> None:
    on, off = toy.make_runner(GraphSettings(mode=mode)), toy.make_runner(GraphSettings(tiers=frozenset()))
    for seed, lengths in enumerate([(4, 6, 8), (5, 5, 8), (3,), (31,)]):
        values = toy.batch(*lengths, seed=seed)
        assert torch.equal(on.run(values, copy_out)["y"], off.run(values, copy_out)["y"])


def test_strict_turns_a_fallback_into_an_error() -> None:
    runner = toy.make_runner(GraphSettings(strict=True))
    runner.run(toy.batch(5), copy_out)
    with pytest.raises(GraphError, match=r"toy batch of segments=1 tokens=40 is not replayed.*tokens: 40 > 32"):
        runner.run(toy.batch(40), copy_out)


def test_strict_replays_even_where_eager_measured_faster() -> None:
    runner = toy.make_runner(GraphSettings(strict=True))
    runner.catalogue.costs = TierCosts(eager=Curve(((16, 1.0),)), graph=Curve(((16, 2.0),)))
    runner.run(toy.batch(5), copy_out)
    assert runner.stats.replays == {Tier.CAPACITY: 1}


def test_retiring_a_graph_stops_its_replays_and_changes_no_bit() -> None:
    runner = toy.make_runner()
    values = toy.batch(5, 7)
    before = runner.run(values, copy_out)["y"]
    key = runner.decide(runner.phase.arena.admit(values)).key
    assert key is not None
    runner.catalogue.retire(key, "it was wrong once")
    assert torch.equal(runner.run(values, copy_out)["y"], before), "padded as the graph was"
    assert runner.stats.fallbacks == {Reason.OUT_OF_SERVICE: 1}
    assert str(runner.decide(runner.phase.arena.admit(values))).endswith("out of service (it was wrong once)")
    [retired] = [graph for graph in runner.snapshot()["graphs"] if graph["out_of_service"]]
    assert retired["key"] == str(key) and retired["out_of_service"] == "it was wrong once"


def test_a_batch_whose_exact_graph_is_retired_runs_in_its_bucket() -> None:
    runner = toy.make_runner(GraphSettings(tiers=BOTH))
    values = toy.batch(5, 7)
    runner.capture_exact(values)
    decision = runner.decide(runner.phase.arena.admit(values))
    assert decision.tier is Tier.EXACT and decision.key is not None
    runner.catalogue.retire(decision.key, "it was wrong once")
    assert runner.decide(runner.phase.arena.admit(values)).tier is Tier.CAPACITY


def test_an_observer_sees_every_pass_and_its_outputs() -> None:
    class Noting:
        def __init__(self) -> None:
            self.keys: list[GraphKey | None] = []
            self.outputs: list[torch.Tensor] = []

        def before(self, batch: Batch, key: GraphKey | None) -> None:
            self.keys.append(key)

        def after(self, outputs: Outputs) -> None:
            self.outputs.append(outputs["y"].clone())

    runner = toy.make_runner()
    runner.observer = observer = Noting()
    results = [runner.run(toy.batch(*lengths), copy_out)["y"] for lengths in ((5, 7), (30, 30))]
    assert [key is None for key in observer.keys] == [False, True], "a replay, and a batch that no bucket holds"
    assert all(torch.equal(seen, result) for seen, result in zip(observer.outputs, results, strict=True))


def test_a_consumer_that_keeps_a_view_is_refused() -> None:
    runner = toy.make_runner()
    assert runner.run(toy.batch(5), lambda outputs: float(outputs["y"].sum())) != 0
    with pytest.raises(GraphError, match=r"the consumer of toy kept a view of an output buffer \(y\)"):
        runner.run(toy.batch(5), lambda outputs: {"kept": [outputs["y"][:, :16]]})
    assert runner.run(toy.batch(5), copy_out)["y"].shape == (5, toy.WIDTH), "the next run is not affected"


@dataclass
class Holder:
    view: Any


KEEPERS: dict[str, Callable[[Any, list[Any]], Any]] = {
    "in a list of its own": lambda outputs, kept: kept.append(outputs["y"]),
    "in a dataclass": lambda outputs, kept: Holder(outputs["y"][1:]),
    "in a generator": lambda outputs, kept: (row.clone() for row in outputs["y"]),
    "as an array": lambda outputs, kept: outputs["y"].numpy(),
    "in a closure": lambda outputs, kept: lambda: outputs["y"].sum(),
}


@pytest.mark.parametrize("how", KEEPERS)
def test_a_view_is_refused_however_it_is_kept(how: str) -> None:
    runner, kept = toy.make_runner(), list[Any]()
    with pytest.raises(GraphError, match="kept a view"):
        runner.run(toy.batch(5), lambda outputs: KEEPERS[how](outputs, kept))


def test_a_view_in_a_cycle_that_nobody_reaches_is_not_kept() -> None:
    def consume(outputs: Mapping[str, Tensor]) -> float:
        cycle: list[Any] = [outputs["y"]]
        cycle.append(cycle)
        return float(outputs["y"].sum())

    gc.disable()
    try:
        assert toy.make_runner().run(toy.batch(5), consume) != 0
    finally:
        gc.enable()


def test_a_strided_view_of_the_arena_is_refused() -> None:
    """`arena.rows("x", 8)[::2]` starts where the buffer does, but does not consist of its first four rows."""
    runner = toy.make_runner()
    arena = runner.phase.arena
    arena.rows("x", 8).copy_(toy.batch(8)["x"])
    expected = runner.eager({**toy.batch(4), "x": arena.rows("x", 8)[::2].clone()}, copy_out)["y"]
    arena.rows("x", 8).copy_(toy.batch(8)["x"])
    for view in (arena.rows("x", 8)[::2], arena.rows("x", 8)[2:6]):
        with pytest.raises(GraphError, match=r"input 'x' of strides .* is a view of the arena, but not the first rows"):
            runner.run({**toy.batch(4), "x": view}, copy_out)
    copied = runner.run({**toy.batch(4), "x": arena.rows("x", 8)[::2].clone()}, copy_out)["y"]
    assert torch.allclose(copied, expected, atol=1e-5)


def test_four_threads_on_one_runner_are_refused_or_right() -> None:
    runner = toy.make_runner()
    batches = [toy.batch(4, 6, seed=seed) for seed in range(4)]
    expected = [runner.run(values, copy_out)["y"] for values in batches]
    wrong, refused = [], []
    together = Barrier(4)

    def work(i: int) -> None:
        together.wait()
        for _ in range(60):
            try:
                if not torch.equal(runner.run(batches[i], copy_out)["y"], expected[i]):
                    wrong.append(i)
            except GraphError as error:
                refused.append(str(error))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert not wrong
    assert all("runs in another thread" in text for text in refused)


def test_a_second_thread_is_refused_while_a_batch_is_consumed() -> None:
    runner = toy.make_runner()

    def consume(outputs: Mapping[str, Tensor]) -> str:
        with ThreadPoolExecutor(1) as threads:
            error = threads.submit(runner.run, toy.batch(3), copy_out).exception()
        return str(error)

    assert "shares memory with a pass that runs in another thread" in runner.run(toy.batch(5), consume)


def test_finished_and_refused_runs_do_not_block_other_threads() -> None:
    runner = toy.make_runner()
    expected = runner.run(toy.batch(5), copy_out)["y"]
    with pytest.raises(GraphError, match="entered again"):
        runner.run(toy.batch(5), lambda outputs: runner.run(toy.batch(3), copy_out))
    with ThreadPoolExecutor(1) as threads:
        assert torch.equal(threads.submit(runner.run, toy.batch(5), copy_out).result()["y"], expected)


def test_a_consumer_that_runs_another_batch_is_refused() -> None:
    runner = toy.make_runner()
    with pytest.raises(GraphError, match="entered again by the consumer of its own outputs"):
        runner.run(toy.batch(5), lambda outputs: runner.run(toy.batch(3), copy_out))
    assert runner.run(toy.batch(5), copy_out)["y"].shape[0] == 5


def test_results_that_were_handed_over_do_not_change() -> None:
    runner = toy.make_runner()
    first = runner.run(toy.batch(4, 6), copy_out)["y"]
    kept = first.clone()
    for seed in range(5):
        runner.run(toy.batch(4, 6, seed=seed), copy_out)
    assert torch.equal(first, kept)


def test_an_empty_batch_is_all_padding() -> None:
    runner = toy.make_runner()
    assert runner.run(toy.batch(), copy_out)["y"].shape == (0, toy.WIDTH)


def test_a_decision_for_another_structure_or_a_missing_graph_is_refused() -> None:
    runner = toy.make_runner(GraphSettings(tiers=BOTH))
    runner.capture_exact(toy.batch(4, 6, 8))
    decision = runner.decide(runner.phase.arena.admit(toy.batch(4, 6, 8)))
    assert runner.obey(decision, toy.batch(4, 6, 8), copy_out)["y"].shape[0] == 18
    with pytest.raises(GraphError, match=r"graph .* has a different structure from the batch"):
        runner.obey(decision, toy.batch(5, 5, 8), copy_out)
    assert decision.key is not None
    runner.drop([decision.key])
    with pytest.raises(GraphError, match="no graph is captured for"):
        runner.obey(decision, toy.batch(4, 6, 8), copy_out)


def test_a_runner_reports_how_the_last_batch_ran() -> None:
    """Ranks compare these reports."""
    runner = toy.make_runner()
    runner.run(toy.batch(5), copy_out)
    assert (str(runner.last), runner.last_rows) == ("toy/full segments=4 tokens=16", 5)
    assert runner.phase.arena.views(Capacity.of(tokens=16, segments=4))["x"][5:].eq(0).all(), "padded, not poisoned"
    runner.run(toy.batch(40), copy_out)
    assert (runner.last, runner.last_rows) == ("toy eager segments=1 tokens=40", 40)


def test_a_graph_stored_under_another_key_is_refused() -> None:
    runner = toy.make_runner()
    large, small = runner.graphs
    runner._graphs = {large.key: small, small.key: large}
    with pytest.raises(GraphError, match=r"graph \[.* tokens=32\] is stored under the key of \[.* tokens=16\]"):
        runner.run(toy.batch(5), copy_out)


def test_an_example_shrinks_until_it_fits_its_bucket() -> None:
    runner = GraphRunner(replace(toy.make_phase(((16, 2),)), typical=4))
    found = runner.example_for(runner.phase.buckets[0]).sizes
    assert found == Capacity.of(tokens=4, segments=1), "four segments are too many, and so are two plus padding"
    with pytest.raises(ConfigError, match="no example of phase toy fits its bucket segments=1 tokens=16"):
        GraphRunner(replace(toy.make_phase(((16, 1),)), typical=4)).capture_buckets()


def test_a_bucket_larger_than_the_arena_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"bucket segments=4 tokens=99 of phase toy is larger than its arena"):
        toy.make_phase(((99, 4),), arena=toy.make_arena(32, 4))


def test_progress_names_every_graph_largest_first() -> None:
    runner, seen = GraphRunner(toy.make_phase()), []
    runner.capture_buckets(lambda done, total, key: seen.append((done, total, key.capacity["tokens"])))
    assert seen == [(0, 2, 32), (1, 2, 16)]


def use(runner: GraphRunner, rows: int, times: int) -> None:
    for _ in range(times):
        runner.run(toy.batch(rows), copy_out)


def full_runner() -> GraphRunner:
    """Has exact graphs for batches of 3 and 5 rows, each seen once, and no room for another."""
    runner = toy.make_runner(GraphSettings(tiers=BOTH, exact_after=1, exact_max_graphs=2))
    for rows in (3, 5):
        use(runner, rows, 1)
        runner.capture_hot()
    return runner


def rows_with_graphs(runner: GraphRunner) -> list[int]:
    exact = [graph.key for graph in runner.graphs if graph.key.digest]
    assert len(exact) == len(runner.catalogue.exact.graphs) and all(
        key in runner.catalogue.exact.graphs for key in exact
    ), "runner and index agree"
    return sorted(key.capacity["tokens"] for key in exact)


class TestExact:
    def test_a_frequent_layout_gets_its_own_graph_when_idle(self) -> None:
        runner = toy.make_runner(GraphSettings(tiers=BOTH, exact_after=2))
        values = toy.batch(4, 6, 8)
        for _ in range(2):
            assert runner.capture_hot() == []
            runner.run(values, copy_out)
        assert [key.capacity for key in runner.capture_hot()] == [Capacity.of(tokens=18, segments=3)]
        result = runner.run(values, copy_out)["y"]
        torch.testing.assert_close(result, toy.alone(runner, values), rtol=0, atol=1e-5)
        assert runner.stats.replays == {Tier.CAPACITY: 2, Tier.EXACT: 1}

    def test_another_layout_of_the_same_sizes_does_not_use_it(self) -> None:
        runner = self.hot_runner((4, 6, 8))
        other = toy.batch(5, 5, 8)
        assert runner.decide(runner.phase.arena.admit(other)).tier is Tier.CAPACITY
        result = runner.run(other, copy_out)["y"]
        torch.testing.assert_close(result, toy.alone(runner, other), rtol=0, atol=1e-5)

    def test_host_boundaries_may_be_read_where_the_key_covers_them(self) -> None:
        phase = toy.make_phase(encoder=toy.Encoder(toy.from_key))
        runner = GraphRunner(phase, GraphSettings(tiers=frozenset({Tier.EXACT}), exact_after=1))
        values = toy.batch(4, 6, 8)
        runner.run(values, copy_out)
        runner.capture_hot()
        fresh = toy.batch(4, 6, 8, seed=5)
        result = runner.run(fresh, copy_out)["y"]
        assert runner.stats.replays.total() == 1
        torch.testing.assert_close(result, toy.alone(runner, fresh), rtol=0, atol=1e-5)

    def test_host_boundaries_are_refused_where_they_are_data(self) -> None:
        with pytest.raises(GraphError, match="'cu' is data in a capacity graph"):
            toy.make_runner(encoder=toy.Encoder(toy.from_key))

    def test_count_and_bytes_stay_bounded_while_500_layouts_pass(self) -> None:
        settings = GraphSettings(tiers=BOTH, exact_after=1, exact_max_graphs=4, exact_max_bytes=400_000)
        runner = toy.make_runner(settings, buckets=((8, 4),))
        rng = torch.Generator().manual_seed(3)
        for seed in range(500):
            lengths = torch.randint(1, 4, (2,), generator=rng).tolist()
            runner.run(toy.batch(*lengths, seed=seed), copy_out)
            if seed % 10 == 0:
                runner.capture_hot(limit=2)
            assert len(runner.catalogue.exact.graphs) <= 4
            assert runner.catalogue.exact.nbytes <= 400_000
        assert len(runner.catalogue.exact.graphs) > 0
        assert runner.stats.fallbacks.total() == 0

    def test_hot_layouts_are_captured_one_at_a_time_and_only_once(self) -> None:
        runner = toy.make_runner(GraphSettings(tiers=BOTH, exact_after=1))
        for rows in (3, 5):
            use(runner, rows, 1)
        assert len(runner.capture_hot()) == 1 and runner.catalogue.exact.has_pending, "one per call"
        runner.capture_hot()
        runner.capture_exact(toy.batch(3))
        assert runner.stats.captures == 4, "two buckets and two layouts"
        assert [graph["tier"] for graph in runner.snapshot()["graphs"]] == ["capacity"] * 2 + ["exact"] * 2

    def test_a_far_more_frequent_layout_replaces_the_least_used_graph(self) -> None:
        runner = full_runner()
        use(runner, 3, 3)
        use(runner, 7, 2)
        assert not runner.catalogue.exact.has_pending, "twice as often is not far more often"
        use(runner, 7, 1)
        assert len(runner.capture_hot()) == 1
        assert rows_with_graphs(runner) == [3, 7]

    def test_among_equally_used_graphs_the_least_recently_used_is_replaced(self) -> None:
        runner = full_runner()
        use(runner, 5, 1)
        use(runner, 3, 1)
        use(runner, 7, 5)
        runner.capture_hot()
        assert rows_with_graphs(runner) == [3, 7]

    def test_equally_frequent_layouts_do_not_thrash(self) -> None:
        runner = toy.make_runner(GraphSettings(tiers=BOTH, exact_after=4, exact_max_graphs=2))
        order = torch.randint(1, 8, (400,), generator=torch.Generator().manual_seed(5)).tolist()
        for rows in order:
            use(runner, rows, 1)
            runner.capture_hot()
        assert runner.stats.captures <= len(runner.graphs) + 4, "hundreds of batches, a handful of captures"

    def test_a_layout_that_was_hot_cools_down(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("saccade.choice.exact.WINDOW", 8)
        runner = toy.make_runner(GraphSettings(tiers=BOTH, exact_after=2, exact_max_graphs=1))
        use(runner, 3, 40)
        runner.capture_hot()
        use(runner, 5, 24)
        runner.capture_hot()
        assert rows_with_graphs(runner) == [5], "without halving, 3 would still lead"

    def test_the_replaced_graph_is_dropped_before_the_new_one_is_captured(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runner = full_runner()
        use(runner, 7, 3)
        held: list[list[int]] = []
        plain = runner._capture_exact

        def counted(layout: ExactLayout) -> CapturedGraph:
            held.append(rows_with_graphs(runner))
            return plain(layout)

        monkeypatch.setattr(runner, "_capture_exact", counted)
        runner.capture_hot()
        assert held == [[5]] and rows_with_graphs(runner) == [5, 7]

    def test_a_layout_that_would_not_be_replayed_is_not_captured(self) -> None:
        runner = toy.make_runner(GraphSettings(tiers=BOTH, exact_after=1))
        runner.catalogue.costs = TierCosts(eager=Curve(((16, 1.0),)), graph=Curve(((16, 2.0),)))
        runner.run(toy.batch(3, 5), copy_out)
        assert not runner.catalogue.exact.has_pending
        runner.catalogue.costs = None
        runner.run(toy.batch(3, 5), copy_out)
        assert len(runner.capture_hot()) == 1
        runner.catalogue.costs = TierCosts(eager=Curve(((16, 1.0),)), graph=Curve(((16, 2.0),)))
        runner.run(toy.batch(3, 5), copy_out)
        assert runner.stats.fallbacks[Reason.EAGER_FASTER] == 2 and not runner.catalogue.exact.has_pending

    def test_a_layout_whose_bucket_is_as_fast_is_not_captured(self) -> None:
        runner = toy.make_runner(GraphSettings(tiers=BOTH, exact_after=1))
        runner.catalogue.costs = TierCosts(eager=Curve(((8, 9.0), (16, 9.0))), graph=Curve(((8, 2.0), (16, 1.0))))
        runner.run(toy.batch(3, 5), copy_out)
        assert runner.stats.replays[Tier.CAPACITY] == 1 and not runner.catalogue.exact.has_pending
        runner.catalogue.costs = TierCosts(eager=Curve(((8, 9.0), (16, 9.0))), graph=Curve(((8, 1.0), (16, 2.0))))
        runner.run(toy.batch(3, 5), copy_out)
        assert len(runner.capture_hot()) == 1
        runner.run(toy.batch(3, 5), copy_out)
        assert runner.stats.replays[Tier.EXACT] == 1

    def test_a_capture_that_failed_or_was_too_large_is_not_tried_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        runner = toy.make_runner(GraphSettings(tiers=BOTH, exact_after=1))
        with monkeypatch.context() as patched:
            patched.setattr("saccade.graphs.runner.capture", _fail)
            runner.run(toy.batch(3, 5), copy_out)
            with pytest.raises(MemoryError):
                runner.capture_hot()
        runner.run(toy.batch(3, 5), copy_out)
        assert not runner.catalogue.exact.has_pending
        runner.run(toy.batch(4, 5), copy_out)
        assert len(runner.capture_hot()) == len(runner.catalogue.exact.graphs) == 1, "others are captured"
        alone = frozenset({Tier.EXACT})  # with buckets it would find memory in their pool
        small = toy.make_runner(GraphSettings(tiers=alone, exact_after=1, exact_max_bytes=1))
        for _ in range(3):
            small.run(toy.batch(3, 5), copy_out)
            small.capture_hot()
        assert small.stats.captures == len(small.graphs) + 1 and len(small.catalogue.exact.graphs) == 0

    @staticmethod
    def hot_runner(lengths: tuple[int, ...]) -> GraphRunner:
        runner = toy.make_runner(GraphSettings(tiers=BOTH, exact_after=1))
        runner.run(toy.batch(*lengths), copy_out)
        assert len(runner.capture_hot()) == 1
        return runner


class TestCosts:
    eager = Curve(((10, 1.0), (100, 10.0)))
    graph = Curve(((10, 2.0), (100, 4.0)))

    def test_times_are_interpolated_and_grow_in_proportion_beyond(self) -> None:
        assert self.eager.at(5) == 1.0
        assert self.eager.at(55) == pytest.approx(5.5)
        assert self.eager.at(200) == pytest.approx(20.0)

    def test_the_cheapest_tier_wins(self) -> None:
        costs = TierCosts(self.eager, self.graph)
        assert costs.cheapest({Tier.EAGER: 10, Tier.CAPACITY: 10}) is Tier.EAGER
        assert costs.cheapest({Tier.EAGER: 90, Tier.CAPACITY: 100}) is Tier.CAPACITY
        assert costs.cheapest({Tier.EAGER: 90, Tier.CAPACITY: 100, Tier.EXACT: 90}) is Tier.EXACT

    def test_a_replay_wins_a_tie(self) -> None:
        costs = TierCosts(eager=Curve(((10, 1.0),)), graph=Curve(((10, 1.0),)))
        assert costs.cheapest({Tier.EAGER: 10, Tier.CAPACITY: 10}) is Tier.CAPACITY
        assert costs.cheapest({Tier.CAPACITY: 10, Tier.EXACT: 10}) is Tier.EXACT

    def test_ways_are_measured_in_turn(self) -> None:
        turns: list[tuple[str, int]] = []

        def slow_way(size: int) -> None:
            turns.append(("slow", size))
            sleep(0.004)

        slow, fast = measure([slow_way, lambda size: turns.append(("fast", size))], sizes=[3, 5], wait=lambda: None)
        for size in (3, 5):
            names = [name for name, of in turns if of == size]
            assert names[:2] == ["slow", "fast"]  # a warm-up
            assert len(names) > 2 and names[2:] == ["slow", "slow", "fast", "fast"] * ((len(names) - 2) // 4)
        assert [size for size, _ in slow.points] == [size for size, _ in fast.points] == [3, 5]
        assert all(slow.at(size) >= 0.004 for size in (3, 5))

    def test_the_time_that_the_host_is_busy_is_charged_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A call takes 4 s on the host and 6 s on the device. The host prepares the second call while the first runs,
        but during its 4 s it can launch nothing else."""
        now = done = 0.0

        def way(size: int) -> None:
            nonlocal now, done
            now += 4.0
            done = max(done, now) + 6.0

        def wait() -> None:
            nonlocal now
            now = max(now, done)

        monkeypatch.setattr("saccade.choice.costs.perf_counter", lambda: now)
        (curve,) = measure([way], sizes=[1], wait=wait)
        assert curve.at(1) == (4 + 6 + 6) / 2 + 4

    def test_a_runner_follows_its_costs(self) -> None:
        runner = toy.make_runner(buckets=((16, 4),))
        runner.catalogue.costs = TierCosts(eager=Curve(((16, 1.0),)), graph=Curve(((16, 2.0),)))
        runner.run(toy.batch(3), copy_out)
        assert runner.stats.fallbacks == {Reason.EAGER_FASTER: 1}
        runner.catalogue.costs = TierCosts(eager=Curve(((16, 2.0),)), graph=Curve(((16, 1.0),)))
        runner.run(toy.batch(3), copy_out)
        assert runner.stats.replays.total() == 1

    def test_costs_are_measured(self) -> None:
        runner = toy.make_runner(buckets=((8, 4), (12, 4), (16, 4)))
        costs = runner.calibrate()
        assert [rows for rows, _ in costs.graph.points] == [8, 12, 16]
        assert all(graph.num_replays for graph in runner.graphs)
        assert all(seconds > 0 for _, seconds in (*costs.graph.points, *costs.eager.points))

    def test_replays_are_timed_up_to_a_size(self, monkeypatch: pytest.MonkeyPatch) -> None:
        buckets = ((8, 4), (12, 4), (16, 4))
        for max_rows, timed in ((12, [8, 12]), (4, [8])):
            monkeypatch.setattr("saccade.graphs.runner.MAX_TIMED_ROWS", max_rows)
            runner = toy.make_runner(buckets=buckets)
            runner.time_replays()
            assert runner.catalogue.seconds is not None and runner.catalogue.costs is None
            assert [rows for rows, _ in runner.catalogue.seconds.points] == timed
            assert [bool(graph.num_replays) for graph in runner.graphs[::-1]] == [n in timed for n, _ in buckets]
        off = toy.make_runner(GraphSettings(tiers=frozenset()), buckets=buckets)
        off.time_replays()
        assert off.catalogue.seconds is None, "there is nothing to replay"


def _fail(*args: object, **named: object) -> None:
    raise MemoryError


def test_every_bucket_is_warmed_up_before_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets with equally many rows may launch different kernels, because attention is split by requests, too."""
    warmed: list[bool] = []

    def note(*args: object, is_warm: bool, **named: object) -> SimpleNamespace:
        warmed.append(is_warm)
        return SimpleNamespace(capture_s=0.0)

    monkeypatch.setattr("saccade.graphs.runner.capture", note)
    toy.make_runner(buckets=((16, 4), (16, 8), (8, 4)))
    assert warmed == [False] * 3


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="exact_after is 0"):
        GraphSettings(exact_after=0)
    with pytest.raises(ConfigError, match="not a tier"):
        GraphSettings(tiers=frozenset({Tier.EAGER}))

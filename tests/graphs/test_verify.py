"""`verify` must pass right graphs and fail wrong ones."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from saccade.config import GraphSettings, Mode
from saccade.errors import GraphError
from saccade.graphs import Arena, Body, Capacity, Frame, GraphRunner, Phase, boundaries, bridge, output, rows, verify
from tests.engine.wrong_graphs import spoil
from tests.graphs import toy
from tests.graphs.mutations import BOTH, Mutations


class TestOnTheRecordedTwin(Mutations):
    device = "cpu"


def test_a_report_without_checks_is_not_right() -> None:
    assert not verify(toy.make_runner(GraphSettings(tiers=frozenset()))).is_right


def test_a_report_names_every_graph_and_verdict() -> None:
    text = str(verify(toy.make_runner()))
    assert text.count("  ok") == 7
    assert "toy/full segments=4 tokens=16" in text


def test_a_sequence_that_ends_in_one_process_ends_in_all() -> None:
    """A pass that exchanges tensors needs all of them, so all must run the same passes, whatever one of them finds."""
    wrong, right = toy.make_runner(), toy.make_runner()
    for graph in wrong.graphs[:2]:
        spoil(graph, partial(graph.frame["y"].view(-1)[:1].add_, 1))
    found: list[bool] = []

    def note(one: bool) -> bool:
        found.append(one)
        return one

    passes = [noted_passes(runner) for runner in (wrong, right)]
    report = verify(wrong, anywhere=note)
    answers = iter(found)
    other = verify(right, anywhere=lambda one: next(answers) | one)
    assert not report.is_right and other.is_right and not list(answers)
    assert passes[0] == passes[1] and passes[0]
    ends = [[(row.key, row.sequence, row.num_batches) for row in each.rows] for each in (report, other)]
    assert ends[0] == ends[1]


def test_an_error_is_reported_by_one_process_and_raised_by_several() -> None:
    """The others may wait inside the pass that failed, and would not run the next sequence."""

    def fail() -> NoReturn:
        raise RuntimeError("out of memory")

    runner, failing = toy.make_runner(), cast(Any, fail)
    for graph in runner.graphs:
        graph.steps = (failing,)
    problem = "the body fails on a batch padded to its bucket: out of memory"
    assert {row.problem for row in verify(runner).rows} == {problem}
    with pytest.raises(GraphError, match=rf"^graph \[toy/full .*\] fails in sequence 'equal totals': {problem}$"):
        verify(runner, anywhere=lambda found: found)


def noted_passes(runner: GraphRunner) -> list[tuple[str, Any]]:
    """Grows with every pass: its kind, and its graph or shape."""
    passes: list[tuple[str, Any]] = []
    eager, replay = runner.eager, runner.replay

    def noted_eager(*args: Any, **how: Any) -> Any:
        passes.append(("eager", how.get("at")))
        return eager(*args, **how)

    def noted_replay(key: Any, *args: Any, **how: Any) -> Any:
        passes.append(("replay", key))
        return replay(key, *args, **how)

    vars(runner)["eager"], vars(runner)["replay"] = noted_eager, noted_replay
    return passes


def test_phases_without_segments_are_verified_too() -> None:
    arena = Arena(
        [rows("x", ("tokens", 4), torch.float32), output("y", ("tokens", 4), torch.float32)], {"tokens": 8}, "cpu"
    )
    phase = Phase(
        name="rows",
        body=lambda frame: {"y": frame["x"].tanh()},
        arena=arena,
        rows="tokens",
        buckets=(Capacity.of(tokens=8),),
        example=lambda lengths, rng: {"x": torch.randn(sum(lengths), 4, generator=rng)},
    )
    runner = GraphRunner(phase)
    runner.capture_buckets()
    assert verify(runner).is_right


def windows(lengths: tuple[int, ...], rng: torch.Generator) -> dict[str, Any]:
    halves = [half for length in lengths for half in (length // 2, length - length // 2)]
    return {**toy.example(lengths, rng), "windows": [0, *np.cumsum(halves).tolist()]}


def test_window_boundaries_are_data_and_part_of_the_digest() -> None:
    """Two kinds of boundaries over the same rows, as in a vision tower with window and full attention."""

    def body(frame: Frame) -> dict[str, Tensor]:
        x = torch.cat([frame["x"]] * 3, dim=1)
        inner = toy.segment_attention(x, frame["windows"])
        return {"y": toy.segment_attention(torch.cat([inner] * 3, dim=1), frame["cu"])}

    base = toy.make_phase()
    declared = [*base.arena.buffers.values(), boundaries("windows", of="tokens", count="cuts")]
    arena = Arena(declared, {"tokens": 32, "segments": 6, "cuts": 12}, "cpu")
    bucket = Capacity.of(tokens=32, segments=6, cuts=12)
    phase = replace(base, body=body, arena=arena, buckets=(bucket,), example=windows, state={})
    runner = GraphRunner(phase, GraphSettings(tiers=BOTH))
    runner.capture_buckets()
    assert verify(runner).is_right
    one, other = toy.batch(6, 4), toy.batch(6, 4)
    keys = [
        runner.catalogue.key(batch.sizes, batch.structure)
        for batch in (arena.admit({**one, "windows": [0, 3, 10]}), arena.admit({**other, "windows": [0, 4, 10]}))
    ]
    assert keys[0] != keys[1]


def test_bridges_are_shared_by_all_layers() -> None:
    small = toy.make_runner(GraphSettings(mode=Mode.PIECEWISE)).phase.arena
    assert small.nbytes < 32 * toy.WIDTH * 4 * 8, "three layers, one set of bridges"


def test_a_repeatable_batch_is_run_eagerly_once() -> None:
    def num_eager_runs(is_repeatable: bool) -> int:
        runner = toy.make_runner()
        runner.phase = replace(runner.phase, is_repeatable=is_repeatable)
        eager, calls = runner.eager, []

        def counted(*args: Any, **options: Any) -> Any:
            calls.append(options)
            return eager(*args, **options)

        runner.eager = counted  # type: ignore[method-assign]
        buckets = [runner.graphs[0].key.capacity]
        assert verify(runner, buckets=buckets, same_shape=True).is_right
        return len(calls)

    assert num_eager_runs(is_repeatable=False) - num_eager_runs(is_repeatable=True) == 4


class Loud(toy.Encoder):
    """One channel is far larger than all others, in the least precise dtype."""

    def __init__(self, attend: toy.Attend) -> None:
        super().__init__(attend, torch.bfloat16)

    def forward(self, frame: Frame) -> dict[str, Tensor]:
        y = super().forward(frame)["y"]
        loud = torch.zeros(toy.WIDTH, dtype=y.dtype, device=y.device)
        loud[3] = 64
        return {"y": y + loud}


@pytest.mark.parametrize("same_shape", [True, False])
def test_a_large_channel_hides_no_frozen_boundary(same_shape: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    host = toy.HostCopy(monkeypatch)
    exact_size = ((18, 3),)
    right = toy.make_runner(encoder=Loud(toy.from_data), buckets=exact_size)
    assert verify(right, same_shape=same_shape).is_right, str(verify(right, same_shape=same_shape))
    assert not verify(toy.make_runner(encoder=Loud(host.attend), buckets=exact_size), same_shape=same_shape).is_right


class Tokens:
    """Returns integers next to a bfloat16 output: those of the batch, or stale ones of the capture."""

    def __init__(self, is_stale: bool) -> None:
        self.is_stale, self.seen = is_stale, torch.zeros(0)

    def __call__(self, frame: Frame) -> dict[str, Tensor]:
        if self.is_stale and not len(self.seen):
            self.seen = torch.from_numpy(frame["x"].float().numpy().copy())  # not recorded
        source = self.seen if self.is_stale and frame.capacity["tokens"] == len(self.seen) else frame["x"]
        return {"y": frame["x"].tanh(), "ids": source.argmax(-1)}


@pytest.mark.parametrize("is_stale", [False, True])
def test_stale_ids_are_found_next_to_a_bfloat16_output(is_stale: bool) -> None:
    runner = rows_runner(Tokens(is_stale), torch.bfloat16, ids=True)
    runner.phase = replace(runner.phase, body=Tokens(False))  # eager runs are right
    assert verify(runner).is_right is not is_stale


@pytest.mark.parametrize("number", [-torch.inf, torch.inf, torch.nan])
def test_non_finite_outputs_are_right_if_eager_runs_have_them(number: float) -> None:
    def body(frame: Frame) -> dict[str, Tensor]:
        return {"y": torch.where(frame["x"] < 0, number, frame["x"].tanh())}

    report = verify(rows_runner(body, torch.float32))
    assert report.is_right, str(report)


def test_a_nondeterministic_kernel_must_be_declared() -> None:
    calls = iter(range(10**6))

    runner = rows_runner(
        lambda frame: {"y": _jittered(frame, calls)}, torch.float32, GraphSettings(mode=Mode.PIECEWISE)
    )
    report = verify(runner)
    assert not report.is_right
    assert "a kernel is not deterministic (name it in Phase.nondeterministic)" in str(report)
    runner.phase = replace(runner.phase, nondeterministic=("jitter",))
    report = verify(runner)
    assert report.is_right, str(report)
    assert 0 < max(row.difference for row in report.rows) < 1e-5
    wrong = rows_runner(lambda frame: {"y": _jittered(frame, calls)}, torch.float32, GraphSettings(mode=Mode.PIECEWISE))
    wrong.phase = replace(
        wrong.phase, nondeterministic=("jitter",), body=lambda frame: {"y": _jittered(frame, calls) * 1.001}
    )
    assert not verify(wrong).is_right, "declared kernels are still compared, within an estimated error"


def test_only_the_given_buckets_are_verified() -> None:
    runner = toy.make_runner()
    keys = {str(graph.key) for graph in runner.graphs}
    for graph in runner.graphs:
        rows_of = verify(runner, buckets=[graph.key.capacity], same_shape=True).rows
        assert {row.key for row in rows_of} & keys == {str(graph.key)}


def test_a_row_has_the_largest_difference_of_all_outputs() -> None:
    runner = rows_runner(lambda frame: numbers(frame, 1, 1), torch.float32, ids=True)
    runner.phase = replace(runner.phase, body=lambda frame: numbers(frame, 2, 1000))  # eager results
    first = verify(runner, same_shape=True).rows[0]
    assert "'y'" in first.problem and first.difference == pytest.approx(0.999)


def numbers(frame: Frame, scale: int, first_id: int) -> dict[str, Tensor]:
    return {"y": frame["x"] * scale, "ids": frame["x"].argmax(-1) * 0 + first_id}


def test_temporaries_hold_nan_before_poisoned_and_shuffled_replays() -> None:
    """A call between two pieces sees what the pieces computed. Without valid rows, all of it is NaN."""
    seen: list[bool] = []

    def look(a: Tensor) -> Tensor:
        seen.append(bool(a.isnan().all()))
        return a * 1

    def body(frame: Frame) -> dict[str, Tensor]:
        return {"y": frame.outside(look, out="b", a=frame["x"] * 1).tanh()}

    runner = rows_runner(body, torch.float32, GraphSettings(mode=Mode.PIECEWISE))
    seen.clear()
    assert verify(runner, same_shape=True).is_right
    assert sum(seen) == 2, "before the batch of the poisoned sequence, and before the first of the shuffled one"


def test_the_problem_says_whether_padding_leaked_or_a_result_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    leaky = rows_runner(lambda frame: {"y": frame["x"] + frame["x"].sum()}, torch.float32)
    (poisoned,) = (row for row in verify(leaky, same_shape=True).rows if row.sequence == "poisoned")
    assert poisoned.problem.startswith("padding matters: ") and poisoned.difference > 0
    monkeypatch.setattr(Arena, "num_views", lambda self, names: 0)  # disables the guard that would refuse a view
    kept = rows_runner(lambda frame: {"y": frame["x"].tanh()}, torch.float32)
    (first,) = (row for row in verify(kept, consume=dict, same_shape=True).rows if row.sequence.startswith("small"))
    assert first.problem.startswith("a result changed after it was handed over: ") and first.difference > 0


def _jittered(frame: Frame, calls: Iterator[int]) -> Tensor:
    """The last bit changes from call to call."""
    moved = frame.outside(lambda a: a * (1 + 1.2e-7 * (next(calls) % 3)), out="b", a=frame["x"] * 1)
    return moved.tanh()


def rows_runner(
    body: Body, dtype: torch.dtype, settings: GraphSettings | None = None, *, ids: bool = False
) -> GraphRunner:
    buffers = [
        rows("x", ("tokens", 4), dtype),
        bridge("a", ("tokens", 4), dtype),
        bridge("b", ("tokens", 4), dtype),
        output("y", ("tokens", 4), dtype),
        *([output("ids", ("tokens",), torch.int64)] if ids else []),
    ]
    phase = Phase(
        name="rows",
        body=body,
        arena=Arena(buffers, {"tokens": 8}, "cpu"),
        rows="tokens",
        buckets=(Capacity.of(tokens=8),),
        example=lambda lengths, rng: {"x": torch.randn(sum(lengths), 4, generator=rng).to(dtype)},
    )
    runner = GraphRunner(phase, settings)
    runner.capture_buckets()
    return runner

"""`verify` must pass what is right and fail what is wrong."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.config import GraphSettings, Mode
from saccade.graphs import Arena, Capacity, Frame, GraphRunner, Phase, boundaries, output, rows, verify
from tests.graphs import toy
from tests.graphs.mutations import BOTH, Mutations


class TestOnTheRecordedTwin(Mutations):
    device = "cpu"


def test_nothing_checked_is_not_right() -> None:
    assert not verify(toy.make_runner(GraphSettings(tiers=frozenset()))).is_right


def test_a_report_names_every_graph_and_verdict() -> None:
    text = str(verify(toy.make_runner()))
    assert text.count("  ok") == 7
    assert "toy/full segments=4 tokens=16" in text


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
    """Two kinds of boundaries over the same rows, as in a tower with window and full attention."""

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
        runner._key(batch.sizes, batch.structure)
        for batch in (arena.admit({**one, "windows": [0, 3, 10]}), arena.admit({**other, "windows": [0, 4, 10]}))
    ]
    assert keys[0] != keys[1]


def test_bridges_are_shared_by_all_layers() -> None:
    small = toy.make_runner(GraphSettings(mode=Mode.PIECEWISE)).phase.arena
    assert small.nbytes < 32 * toy.WIDTH * 4 * 8, "three layers, one set of bridges"


def test_a_batch_that_repeats_itself_is_run_eagerly_once() -> None:
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

    assert num_eager_runs(is_repeatable=False) - num_eager_runs(is_repeatable=True) == 3

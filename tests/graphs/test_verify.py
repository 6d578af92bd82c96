"""`verify` must pass what is right and fail every way we know of getting a graph wrong."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from saccade.config import GraphSettings, Mode, Tier
from saccade.graphs import Arena, Capacity, Frame, GraphRunner, Phase, output, rows, verify
from saccade.graphs import buffers as buffers_module
from saccade.graphs.arena import Batch
from saccade.graphs.capture import CapturedGraph
from tests.graphs import toy

BOTH = frozenset({Tier.CAPACITY, Tier.EXACT})


@pytest.mark.parametrize("mode", Mode)
def test_right_graphs_pass(mode: Mode) -> None:
    report = verify(toy.make_runner(GraphSettings(mode=mode, tiers=BOTH)), seed=7)
    assert report.is_right, str(report)
    assert len(report.rows) == 11, "five sequences on two buckets, and the exact tier"
    assert "poisoned" in str(report)


def test_nothing_checked_is_not_right() -> None:
    assert not verify(toy.make_runner(GraphSettings(tiers=frozenset()))).is_right


def wrong_rows(runner: GraphRunner, **how: Any) -> set[str]:
    report = verify(runner, **how)
    assert not report.is_right, str(report)
    return {row.sequence for row in report.rows if not row.is_right}


def test_a_digest_left_out_of_the_key_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """sglang#16902: the key was the total length, so [5, 5, 8] got the graph of [4, 6, 8]."""
    monkeypatch.setattr(sys.modules["saccade.graphs.runner"], "structure_digest", lambda structure: "same for all")
    phase = toy.make_phase(encoder=toy.Encoder(toy.from_key))
    runner = GraphRunner(phase, GraphSettings(tiers=frozenset({Tier.EXACT})))
    assert wrong_rows(runner) == {"equal totals"}


def test_the_same_runner_with_the_digest_is_right() -> None:
    phase = toy.make_phase(encoder=toy.Encoder(toy.from_key))
    runner = GraphRunner(phase, GraphSettings(tiers=frozenset({Tier.EXACT})))
    assert verify(runner).is_right


def test_a_boundary_frozen_into_the_body_is_found() -> None:
    assert {"equal totals", "A-B-A"} <= wrong_rows(toy.make_runner(encoder=toy.Encoder(toy.frozen)))


def test_the_frozen_boundary_of_sglang_16902() -> None:
    """Shown directly: the graph captured on one segmentation answers for another one with the first's boundaries."""
    runner = toy.make_runner(encoder=toy.Encoder(toy.frozen), buckets=((18, 3),))
    graph = runner.graphs[0]
    arena = runner.phase.arena
    results = {}
    for lengths in ((4, 6, 8), (5, 5, 8)):
        arena.fill(arena.admit(toy.batch(*lengths)), Capacity.of(tokens=18, segments=3))
        graph.replay()
        results[lengths] = arena.views(Capacity.of(tokens=18, segments=3))["y"].clone()
    assert torch.equal(results[4, 6, 8], results[5, 5, 8]), "same rows, other boundaries, same (wrong) answer"


def test_a_boundary_frozen_between_the_pieces_is_harmless() -> None:
    """A call between pieces runs anew at each replay, so what it reads on the host is never stale."""
    runner = toy.make_runner(GraphSettings(mode=Mode.PIECEWISE), encoder=toy.Encoder(toy.frozen))
    assert verify(runner).is_right


def test_padding_that_is_not_fenced_off_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = Arena.fill

    def swallow_padding(self: Arena, batch: Batch, capacity: Mapping[str, int]) -> None:
        fill(self, batch, capacity)
        cu = self.views(capacity)["cu"]
        cu[cu == batch.sizes["tokens"]] = capacity["tokens"]  # the last segment takes the padded rows in

    monkeypatch.setattr(Arena, "fill", swallow_padding)
    assert {"equal totals", "poisoned"} <= wrong_rows(toy.make_runner())


def test_what_one_batch_leaves_for_the_next_is_found() -> None:
    class Leaky(toy.Encoder):
        def __init__(self) -> None:
            super().__init__()
            self.running = nn.Buffer(torch.zeros(toy.WIDTH))

        def forward(self, frame: Frame) -> dict[str, Tensor]:
            self.running.lerp_(frame["x"].mean(0), 0.1)
            return {"y": frame["x"] - self.running}

    assert {"equal totals", "poisoned"} <= wrong_rows(toy.make_runner(encoder=Leaky()))


def test_a_cached_view_of_an_output_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arena, "owns", lambda self, tensor: False)  # the guard that would refuse it
    assert "A-B-A" in wrong_rows(toy.make_runner(), consume=dict)


def test_with_the_guard_a_cached_view_is_refused() -> None:
    report = verify(toy.make_runner(), consume=dict)
    assert all("kept a view" in row.problem for row in report.rows)


def regrow(runner: GraphRunner) -> None:
    """What a workspace that grows after capture does (sglang#29216): older graphs read the old memory."""
    storages = runner.phase.arena._storages
    storages["x"] = torch.zeros_like(storages["x"])


def test_a_regrown_buffer_is_found_even_without_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = toy.make_runner()
    regrow(runner)
    monkeypatch.setattr(CapturedGraph, "_current_pointers", lambda self: self._pointers)
    assert len(wrong_rows(runner)) == 5


def test_with_the_guard_a_regrown_buffer_is_refused() -> None:
    runner = toy.make_runner()
    regrow(runner)
    assert all("'x' was at 0x" in row.problem for row in verify(runner).rows)


def test_a_lost_input_is_found() -> None:
    """sglang#33726: captured without the rows that only images bring."""

    class Lost(toy.Encoder):
        def forward(self, frame: Frame) -> dict[str, Tensor]:
            is_capturing = frame._structure is None
            return {"y": frame["x"] if is_capturing else frame["x"] + 1}

    assert len(wrong_rows(toy.make_runner(encoder=Lost()))) == 5


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
    declared = [*base.arena.buffers.values(), buffers_module.boundaries("windows", of="tokens", count="cuts")]
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

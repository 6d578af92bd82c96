"""Every way we know of getting a graph wrong, to be run on each device: `verify` must find them all."""

import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from saccade.config import GraphSettings, Mode, Tier
from saccade.errors import CaptureError
from saccade.graphs import Arena, Batch, Capacity, Frame, GraphRunner, verify
from saccade.graphs.capture import CapturedGraph
from tests.graphs import toy

BOTH = frozenset({Tier.CAPACITY, Tier.EXACT})
SEQUENCES = {"equal totals", "small-large-small", "shuffled", "poisoned"}


class Mutations:
    device: str

    def runner(self, settings: GraphSettings | None = None, **phase: Any) -> GraphRunner:
        return toy.make_runner(settings, device=self.device, **phase)

    def exact_only(self) -> GraphRunner:
        phase = toy.make_phase(encoder=toy.Encoder(toy.from_key), device=self.device)
        return GraphRunner(phase, GraphSettings(tiers=frozenset({Tier.EXACT})))

    @staticmethod
    def wrong_sequences(runner: GraphRunner, **how: Any) -> set[str]:
        report = verify(runner, **how)
        assert not report.is_right, str(report)
        return {row.sequence for row in report.rows if not row.is_right}

    @pytest.mark.parametrize("mode", Mode)
    def test_right_graphs_pass(self, mode: Mode) -> None:
        report = verify(self.runner(GraphSettings(mode=mode, tiers=BOTH)), seed=7)
        assert report.is_right, str(report)
        assert len(report.rows) == 8, "three sequences on two buckets, one across them, and the exact tier"
        assert {row.sequence for row in report.rows} == SEQUENCES

    def test_a_digest_left_out_of_the_key_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """sglang#16902: the key was the total length, so [5, 5, 8] got the graph of [4, 6, 8]."""
        assert verify(self.exact_only()).is_right
        monkeypatch.setattr(sys.modules["saccade.graphs.runner"], "structure_digest", lambda structure: "same for all")
        assert self.wrong_sequences(self.exact_only()) == {"equal totals"}

    def test_boundaries_frozen_from_the_hosts_copy_are_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        host = toy.HostCopy(monkeypatch)
        runner = self.runner(encoder=toy.Encoder(host.attend))
        assert {"equal totals", "shuffled"} <= self.wrong_sequences(runner)

    def test_the_frozen_boundary_of_sglang_16902(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Shown directly: equal rows, [4, 6, 8] and [5, 5, 8], one graph with frozen boundaries, one (wrong) answer."""
        host = toy.HostCopy(monkeypatch)
        runner = self.runner(encoder=toy.Encoder(host.attend), buckets=((18, 3),))
        capacity = Capacity.of(tokens=18, segments=3)
        arena, answers, right = runner.phase.arena, [], []
        for lengths in ((4, 6, 8), (5, 5, 8)):
            values = toy.batch(*lengths, device=self.device)
            right.append(runner.eager(values, lambda outputs: outputs["y"].clone()))
            arena.fill(arena.admit(values), capacity)
            runner.graphs[0].replay()
            answers.append(arena.views(capacity)["y"].clone())
        assert torch.equal(answers[0], answers[1])
        assert not torch.allclose(right[0], right[1], atol=1e-3)

    def test_boundaries_read_back_while_capturing_are_found_or_refused(self) -> None:
        if self.device == "cuda":
            with pytest.raises(CaptureError, match="the body cannot be captured"):
                self.runner(encoder=toy.Encoder(toy.read_back))
            assert verify(self.runner()).is_right, "a refused capture leaves the device usable"
        else:
            assert "equal totals" in self.wrong_sequences(self.runner(encoder=toy.Encoder(toy.read_back)))

    def test_boundaries_read_between_the_pieces_are_never_stale(self) -> None:
        """A call between pieces runs anew at each replay, so what it reads on the host is live."""
        runner = self.runner(GraphSettings(mode=Mode.PIECEWISE), encoder=toy.Encoder(toy.read_back))
        assert verify(runner).is_right

    def test_padding_that_is_not_fenced_off_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fill = Arena.fill

        def swallow_padding(arena: Arena, batch: Batch, capacity: Mapping[str, int]) -> None:
            fill(arena, batch, capacity)
            cu = arena.views(capacity)["cu"]
            cu[cu == batch.sizes["tokens"]] = capacity["tokens"]  # the last segment takes the padded rows in

        monkeypatch.setattr(Arena, "fill", swallow_padding)
        assert {"equal totals", "poisoned"} <= self.wrong_sequences(self.runner())

    def test_what_one_batch_leaves_for_the_next_is_found(self) -> None:
        class Leaky(toy.Encoder):
            def __init__(self) -> None:
                super().__init__()
                self.running = nn.Buffer(torch.zeros(toy.WIDTH))

            def forward(self, frame: Frame) -> dict[str, Tensor]:
                self.running.lerp_(frame["x"].mean(0), 0.1)
                return {"y": frame["x"] - self.running}

        assert {"equal totals", "poisoned"} <= self.wrong_sequences(self.runner(encoder=Leaky()))

    def test_a_cached_view_of_an_output_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Arena, "owns", lambda self, tensor: False)  # the guard that would refuse it
        assert "equal totals" in self.wrong_sequences(self.runner(), consume=dict)

    def test_with_the_guard_a_cached_view_is_refused(self) -> None:
        report = verify(self.runner(), consume=dict)
        assert all("kept a view" in row.problem for row in report.rows)

    @staticmethod
    def regrow(runner: GraphRunner) -> None:
        """What a workspace that grows after capture does (sglang#29216): older graphs read the old memory."""
        storages = runner.phase.arena._storages
        storages["x"] = torch.zeros_like(storages["x"])

    def test_a_regrown_buffer_is_found_even_without_the_guard(self, monkeypatch: pytest.MonkeyPatch) -> None:
        runner = self.runner()
        self.regrow(runner)
        monkeypatch.setattr(CapturedGraph, "_refuse_moved", lambda self: None)
        assert self.wrong_sequences(runner) == SEQUENCES

    def test_with_the_guard_a_regrown_buffer_is_refused(self) -> None:
        runner = self.runner()
        self.regrow(runner)
        assert all("'x' was at 0x" in row.problem for row in verify(runner).rows)

    def test_an_input_lost_at_capture_is_found(self) -> None:
        """sglang#33726: captured on text alone, the graph never adds the rows that images bring."""

        class Lost(toy.Encoder):
            def forward(self, frame: Frame) -> dict[str, Tensor]:
                is_capturing = frame._structure is None
                return {"y": frame["x"] if is_capturing else frame["x"] + 1}

        assert self.wrong_sequences(self.runner(encoder=Lost())) == SEQUENCES

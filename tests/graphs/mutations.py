"""Every way we know to get a graph wrong, for each device: `verify` and `audit` must find them all."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from saccade.config import GraphSettings, Mode, Tier
from saccade.errors import CaptureError
from saccade.graphs import Arena, Batch, Capacity, Frame, GraphRunner, Phase, audit, metadata, output, rows, verify
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

    @staticmethod
    def assert_audit_finds(runner: GraphRunner, what: str, **how: Any) -> None:
        report = audit(runner, **how)
        assert any(what in finding for row in report.rows for finding in row.findings), f"{what}\n{report}"
        assert not report.is_right

    @pytest.mark.parametrize("mode", Mode)
    def test_right_graphs_pass_the_audit(self, mode: Mode) -> None:
        report = audit(self.runner(GraphSettings(mode=mode, tiers=BOTH)), seed=7)
        assert report.is_right, str(report)
        assert len(report.rows) == 4, "two buckets, a replay, and the exact tier"
        assert report.num_nodes > 50

    @pytest.mark.parametrize("mode", Mode)
    def test_right_graphs_pass(self, mode: Mode) -> None:
        report = verify(self.runner(GraphSettings(mode=mode, tiers=BOTH)), seed=7)
        assert report.is_right, str(report)
        assert len(report.rows) == 8, "three sequences on two buckets, one across them, and the exact tier"
        assert {row.sequence for row in report.rows} == SEQUENCES

    def test_a_digest_left_out_of_the_key_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """sglang#16902: the key was the total length, so [5, 5, 8] got the graph of [4, 6, 8]."""
        assert verify(self.exact_only()).is_right
        monkeypatch.setattr(
            sys.modules["saccade.choice.catalogue"], "structure_digest", lambda structure: "same for all"
        )
        assert self.wrong_sequences(self.exact_only()) == {"equal totals"}
        self.assert_audit_finds(self.exact_only(), "one key for two structures")

    def test_boundaries_frozen_from_the_hosts_copy_are_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        host = toy.HostCopy(monkeypatch)
        runner = self.runner(encoder=toy.Encoder(host.attend))
        assert {"equal totals", "shuffled"} <= self.wrong_sequences(runner)
        self.assert_audit_finds(self.runner(encoder=toy.Encoder(host.attend), buckets=((18, 3),)), "frozen: ")

    def test_the_frozen_boundary_of_sglang_16902(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Shown directly: a graph with frozen boundaries gives [4, 6, 8] and [5, 5, 8] the same answer."""
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
            self.assert_audit_finds(self.runner(encoder=toy.Encoder(toy.read_back)), "frozen: ")

    def test_boundaries_read_between_the_pieces_are_never_stale(self) -> None:
        """A call between pieces runs at each replay, so the host values that it reads are live."""
        runner = self.runner(GraphSettings(mode=Mode.PIECEWISE), encoder=toy.Encoder(toy.read_back))
        assert verify(runner).is_right
        assert audit(runner).is_right

    def test_padding_that_leaks_into_a_segment_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fill = Arena.fill

        def swallow_padding(arena: Arena, batch: Batch, capacity: Mapping[str, int]) -> None:
            fill(arena, batch, capacity)
            cu = arena.views(capacity)["cu"]
            cu[cu == batch.sizes["tokens"]] = capacity["tokens"]  # the last segment swallows the padded rows

        monkeypatch.setattr(Arena, "fill", swallow_padding)
        assert {"equal totals", "poisoned"} <= self.wrong_sequences(self.runner())
        self.assert_audit_finds(self.runner(), "padding: 'cu' does not hold the batch, padded by DummySegment")

    def test_state_that_one_batch_leaves_for_the_next_is_found(self) -> None:
        class Leaky(toy.Encoder):
            def __init__(self) -> None:
                super().__init__()
                self.running = nn.Buffer(torch.zeros(toy.WIDTH))

            def forward(self, frame: Frame) -> dict[str, Tensor]:
                self.running.lerp_(frame["x"].mean(0), 0.1)
                return {"y": frame["x"] - self.running}

        assert {"equal totals", "poisoned"} <= self.wrong_sequences(self.runner(encoder=Leaky()))
        self.assert_audit_finds(self.runner(encoder=Leaky()), "undeclared write: a replay changes 'running'")

    def test_a_buffer_read_before_it_is_written_is_found(self) -> None:
        """Only NaN shows it: what earlier batches leave there are valid numbers."""

        class Stale(toy.Encoder):
            def forward(self, frame: Frame) -> dict[str, Tensor]:
                return {"y": super().forward(frame)["y"] + 0 * frame["attended"]}

        assert self.wrong_sequences(self.runner(encoder=Stale())) == {"poisoned"}

    def test_a_cached_view_of_an_output_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Arena, "num_views", lambda self, names: 0)  # disables the guard that would refuse it
        assert "equal totals" in self.wrong_sequences(self.runner(), consume=dict)
        self.assert_audit_finds(self.runner(), "kept: the consumer keeps a view", consume=dict)

    def test_with_the_guard_a_cached_view_is_refused(self) -> None:
        report = verify(self.runner(), consume=dict)
        assert all("kept a view" in row.problem for row in report.rows)

    @staticmethod
    def regrow(runner: GraphRunner) -> None:
        """A workspace that grows after capture (sglang#29216): older graphs read the old memory."""
        storages = runner.phase.arena._storages
        storages["x"] = torch.zeros_like(storages["x"])

    def test_a_regrown_buffer_is_found_even_without_the_guard(self, monkeypatch: pytest.MonkeyPatch) -> None:
        runner = self.runner()
        self.regrow(runner)
        monkeypatch.setattr(CapturedGraph, "_refuse_moved", lambda self: None)
        assert self.wrong_sequences(runner) == SEQUENCES
        self.assert_audit_finds(runner, "moved since the capture: 'x' was at 0x")

    def test_with_the_guard_a_regrown_buffer_is_refused(self) -> None:
        runner = self.runner()
        self.regrow(runner)
        assert all("'x' was at 0x" in row.problem for row in verify(runner).rows)

    def test_an_input_lost_at_capture_is_found(self) -> None:
        """sglang#33726: captured on text only, the graph never adds the rows of images."""

        class Lost(toy.Encoder):
            def forward(self, frame: Frame) -> dict[str, Tensor]:
                is_capturing = frame._structure is None
                return {"y": frame["x"] if is_capturing else frame["x"] + 1}

        assert self.wrong_sequences(self.runner(encoder=Lost())) == SEQUENCES
        self.assert_audit_finds(self.runner(encoder=Lost()), "another body: ")

    def test_a_write_lost_at_capture_is_found(self) -> None:
        """Even though the eager run before it wrote what the replay does not."""

        class Writing(toy.Encoder):
            def __init__(self) -> None:
                super().__init__()
                self.cache = nn.Buffer(torch.zeros(32, toy.WIDTH))
                self.is_lost = True

            def forward(self, frame: Frame) -> dict[str, Tensor]:
                result = super().forward(frame)
                if not self.is_lost:
                    self.cache[: len(result["y"])].copy_(result["y"])
                return result

        def clear(values: Mapping[str, Any]) -> None:
            encoder.cache.zero_()

        encoder = Writing().to(self.device)
        runner = GraphRunner(
            replace(
                toy.make_phase(encoder=encoder, device=self.device),
                set_up=clear,
                written=lambda values: {"cache": encoder.cache[: len(values["x"])].clone()},
                writes=frozenset({"cache"}),
            )
        )
        runner.capture_buckets()
        encoder.is_lost = False
        assert self.wrong_sequences(runner) == SEQUENCES

    def test_a_host_value_that_no_replay_shows_is_found_by_the_audit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A bound from the host's copy that no example reaches: every replay is right, but the next batch may be
        wrong."""
        host = toy.HostCopy(monkeypatch)

        class Bounded(toy.Encoder):
            def forward(self, frame: Frame) -> dict[str, Tensor]:
                bound = 1000.0 * max(host.lengths, default=0)
                return {"y": super().forward(frame)["y"].clamp(max=bound)}

        runner = self.runner(encoder=Bounded())
        assert verify(runner).is_right
        self.assert_audit_finds(runner, "clamp" if self.device == "cpu" else "frozen: node")

    def test_a_branch_that_only_rare_values_take_is_found_by_the_audit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        host = toy.HostCopy(monkeypatch)

        class Branching(toy.Encoder):
            def forward(self, frame: Frame) -> dict[str, Tensor]:
                y = super().forward(frame)["y"]
                return {"y": y * 1.0 if host.lengths == [1] else y}

        runner = self.runner(encoder=Branching())
        assert verify(runner, buckets=[runner.phase.buckets[0]], same_shape=True).is_right
        self.assert_audit_finds(runner, "frozen: ")

    def test_an_input_that_examples_never_vary_is_found_by_the_audit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """All examples have a scale of 2, and so does the capture."""
        seen: dict[str, float] = {}
        runner = self.scaled(lambda frame: seen["scale"])
        admit = Arena.admit

        def remember(self: Arena, values: Mapping[str, Any]) -> Batch:
            batch = admit(self, values)
            seen["scale"] = float(batch.arrays["scale"].reshape(-1)[0]) if batch.arrays["scale"].size else 2.0
            return batch

        monkeypatch.setattr(Arena, "admit", remember)
        runner.capture_buckets()
        assert verify(runner).is_right, "no batch has another scale"
        self.assert_audit_finds(runner, "frozen: node 0")

    def scaled(self, scale_of: Any) -> GraphRunner:
        arena = Arena(
            [
                rows("x", ("tokens", 4), torch.float32),
                metadata("scale", ("tokens",), torch.float32),
                output("y", ("tokens", 4), torch.float32),
            ],
            {"tokens": 8},
            self.device,
        )
        phase = Phase(
            name="scaled",
            body=lambda frame: {"y": frame["x"] * scale_of(frame)},
            arena=arena,
            rows="tokens",
            buckets=(Capacity.of(tokens=8),),
            example=lambda lengths, rng: {
                "x": torch.randn(sum(lengths), 4, generator=rng).to(self.device),
                "scale": np.full(sum(lengths), 2.0, dtype=np.float32),
            },
        )
        return GraphRunner(phase)

    def test_a_write_at_a_frozen_slot_is_found_by_the_audit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """No compared output shows where it writes."""
        host = toy.HostCopy(monkeypatch)

        class Writing(toy.Encoder):
            def __init__(self) -> None:
                super().__init__()
                self.cache = nn.Buffer(torch.zeros(64, toy.WIDTH))

            def forward(self, frame: Frame) -> dict[str, Tensor]:
                result = super().forward(frame)
                self.cache[sum(host.lengths)].copy_(result["y"][0])
                return result

        encoder = Writing().to(self.device)
        phase = replace(toy.make_phase(encoder=encoder, device=self.device), writes=frozenset({"cache"}))
        runner = GraphRunner(phase)
        runner.capture_buckets()
        assert verify(runner).is_right
        self.assert_audit_finds(runner, "cache+")

"""What `audit` finds beyond the bugs in `mutations.py`: undeclared memory, wrong padding, hidden writes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from saccade.graphs import Arena, Capacity, Frame, GraphRunner, Phase, audit, metadata, output, rows
from saccade.graphs.audit import SMALL_BYTES, AuditReport, AuditRow, fill_problems
from saccade.graphs.buffers import Fill, OwnIndex, Padding
from tests.graphs import toy

PADDINGS: dict[str, Padding] = {"filled": Fill(7), "own": OwnIndex()}


def findings(runner: GraphRunner, **how: Any) -> list[str]:
    return [finding for row in audit(runner, **how).rows for finding in row.findings]


def test_a_tensor_that_nobody_declared_is_found() -> None:
    """Every replay is right until something else writes to it, or it is freed."""
    table = torch.randn(toy.WIDTH)

    class Closing(toy.Encoder):
        def forward(self, frame: Frame) -> dict[str, Tensor]:
            return {"y": super().forward(frame)["y"] + table}

    assert any(finding.startswith("undeclared: node ") for finding in findings(toy.make_runner(encoder=Closing())))
    assert not findings(toy.make_runner())


def test_only_the_given_buckets_are_audited() -> None:
    runner = toy.make_runner()
    keys = [str(graph.key) for graph in runner.graphs]
    assert len(keys) == 2
    for graph in runner.graphs:
        audited = {row.key for row in audit(runner, buckets=[graph.key.capacity]).rows}
        assert audited & set(keys) == {str(graph.key)}


def test_a_branch_that_only_a_single_row_in_the_largest_bucket_takes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    host = toy.HostCopy(monkeypatch)

    class Branching(toy.Encoder):
        def forward(self, frame: Frame) -> dict[str, Tensor]:
            y = super().forward(frame)["y"]
            return {"y": y * 1.0 if host.lengths == [1] and frame.capacity["tokens"] == largest else y}

    largest = max(bucket["tokens"] for bucket in toy.make_phase().buckets)
    runner = toy.make_runner(encoder=Branching())
    wrong = [row.key for row in audit(runner).rows if not row.is_right]
    assert wrong == [str(graph.key) for graph in runner.graphs if graph.key.capacity["tokens"] == largest]


def test_a_write_that_keeps_the_sum_of_small_state_is_found() -> None:
    class Turning(toy.Encoder):
        def __init__(self) -> None:
            super().__init__()
            self.ring = nn.Buffer(torch.arange(1.0, 6.0))

        def forward(self, frame: Frame) -> dict[str, Tensor]:
            self.ring.copy_(self.ring.roll(1))
            return super().forward(frame)

    assert any("a replay changes 'ring'" in finding for finding in findings(toy.make_runner(encoder=Turning())))


@pytest.mark.parametrize("place", [0, 5, -1])
def test_a_write_to_large_state_is_found(place: int) -> None:
    """In any of its pieces, and in the last bytes, which make no whole word."""

    class Writing(toy.Encoder):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Buffer(torch.zeros(6 * SMALL_BYTES + 3, dtype=torch.uint8))

        def forward(self, frame: Frame) -> dict[str, Tensor]:
            self.table[place * SMALL_BYTES if place >= 0 else -1] += 1
            return super().forward(frame)

    assert any("a replay changes 'table'" in finding for finding in findings(toy.make_runner(encoder=Writing())))


def test_a_write_to_large_state_that_begins_inside_a_word_is_found() -> None:
    class Writing(toy.Encoder):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Buffer(torch.zeros(2 * SMALL_BYTES, dtype=torch.uint8)[3:])

        def forward(self, frame: Frame) -> dict[str, Tensor]:
            self.table[SMALL_BYTES] += 1
            return super().forward(frame)

    assert any("a replay changes 'table'" in finding for finding in findings(toy.make_runner(encoder=Writing())))


def test_a_write_that_moves_pieces_of_large_state_is_found() -> None:
    class Turning(toy.Encoder):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Buffer(torch.arange(3.0).repeat_interleave(SMALL_BYTES))

        def forward(self, frame: Frame) -> dict[str, Tensor]:
            self.table.copy_(self.table.roll(SMALL_BYTES))
            return super().forward(frame)

    assert any("a replay changes 'table'" in finding for finding in findings(toy.make_runner(encoder=Turning())))


def test_a_refused_replay_is_a_finding_with_its_reason() -> None:
    runner = toy.make_runner()
    storages = runner.phase.arena._storages
    storages["x"] = torch.zeros_like(storages["x"])
    last = audit(runner).rows[-1]
    assert last.key.endswith("a replay") and "'x' was at 0x" in last.findings[0]


@pytest.mark.parametrize("name", PADDINGS)
def test_padding_of_every_kind_is_recomputed(name: str) -> None:
    runner, capacity = padded_runner(), Capacity.of(tokens=8)
    arena = runner.phase.arena
    batch = arena.admit(runner.phase.example((3,), torch.Generator().manual_seed(0)))
    arena.fill(batch, capacity)
    assert fill_problems(runner, batch, capacity) == []
    for place in (0, 3, 7):  # a row of the batch, the first and the last row of padding
        view = arena.views(capacity)[name]
        right = view.clone()
        view[place] += 1
        (found,) = fill_problems(runner, batch, capacity)
        assert f"{name!r} does not hold the batch, padded by {type(PADDINGS[name]).__name__}" in found
        view.copy_(right)


def padded_runner() -> GraphRunner:
    def example(lengths: tuple[int, ...], rng: torch.Generator) -> Mapping[str, Any]:
        count = sum(lengths)
        numbers = {name: np.arange(20, 20 + count, dtype=np.int32) for name in PADDINGS}
        return {"x": torch.randn(count, 4, generator=rng), **numbers}

    buffers = [
        rows("x", ("tokens", 4), torch.float32),
        *(metadata(name, ("tokens",), padding=padding) for name, padding in PADDINGS.items()),
        output("y", ("tokens", 4), torch.float32),
    ]
    phase = Phase(
        name="padded",
        body=lambda frame: {"y": frame["x"].tanh()},
        arena=Arena(buffers, {"tokens": 8}, "cpu"),
        rows="tokens",
        buckets=(Capacity.of(tokens=8),),
        example=example,
    )
    return GraphRunner(phase)


def test_a_report_lists_its_findings() -> None:
    report = AuditReport((AuditRow("a/full", 3), AuditRow("b/full", 4, ("it froze 7",))))
    assert not report.is_right and report.num_nodes == 7
    first, second, third = str(report).splitlines()
    assert first.endswith("ok") and second.endswith("WRONG") and third.strip() == "it froze 7"

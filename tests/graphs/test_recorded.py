"""The CPU twin must behave like a CUDA graph: same storages, frozen host values, no rerun of the body's Python."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from saccade.errors import CaptureError
from saccade.graphs import verify
from saccade.graphs.recorded import RecordedLane
from tests.graphs import toy


def record(body: Callable[[], object]) -> Callable[[], None]:
    lane = RecordedLane()
    lane.begin()
    try:
        body()
    except BaseException:
        lane.abandon()
        raise
    piece = lane.end()
    assert piece is not None
    return piece


def test_a_replay_reads_and_writes_the_same_storages() -> None:
    x, y = torch.randn(4, 3), torch.empty(4, 3)
    replay = record(lambda: y.copy_(torch.relu(x) * 2 + x.mean()))
    x.copy_(torch.randn(4, 3))
    replay()
    assert torch.equal(y, torch.relu(x) * 2 + x.mean())


def test_views_in_place_updates_and_out_arguments_are_replayed() -> None:
    x, y = torch.randn(4, 6), torch.zeros(2, 12)

    def body() -> None:
        left, right = x.split(3, dim=1)
        both = torch.cat([right, left], dim=1).view(2, 12)
        both[:, ::2].mul_(3)
        torch.add(both, 1, out=y)

    replay = record(body)
    x.copy_(torch.randn(4, 6))
    replay()
    replayed = y.clone()
    body()
    assert torch.equal(replayed, y)


def test_host_values_are_frozen() -> None:
    x, y, scale = torch.ones(3), torch.empty(3), [2.0]
    replay = record(lambda: y.copy_(x * scale[0]))
    scale[0] = 5.0
    replay()
    assert y.tolist() == [2, 2, 2]


def test_a_list_read_from_a_tensor_is_frozen() -> None:
    cu, x, y = torch.tensor([0, 1, 4]), torch.arange(4.0), torch.empty(2)
    replay = record(lambda: y.copy_(torch.stack([part.sum() for part in x.split(cu.diff().tolist())])))
    assert y.tolist() == [0, 6]
    cu.copy_(torch.tensor([0, 3, 4]))
    replay()
    assert y.tolist() == [0, 6], "a CUDA graph would not notice the new boundaries either"


def test_memory_that_is_not_written_keeps_its_content() -> None:
    held: list[Tensor] = []

    def body() -> None:
        scratch = torch.empty(3)
        scratch[0] = 1.0
        held.append(scratch)

    replay = record(body)
    held[0].fill_(float("nan"))
    replay()
    assert held[0][0] == 1
    assert held[0][1:].isnan().all()


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.masked_select(x, x > 0),
        lambda x: torch.repeat_interleave(x.int().abs()),
        lambda x: bool((x > 0).any()),
        lambda x: torch.unique(x),
    ],
)
def test_operations_that_make_the_host_wait_are_refused(read: Callable[[Tensor], object]) -> None:
    with pytest.raises(CaptureError, match="makes the host wait"):
        record(lambda: read(torch.randn(4)))


def test_indexing_by_integers_is_captured() -> None:
    x, index, y = torch.randn(5, 2), torch.tensor([4, 0, 2]), torch.empty(3, 2)

    def body() -> None:
        y.copy_(x[index])
        x[index[:1]] = 0.5

    replay = record(body)
    x.copy_(torch.randn(5, 2))
    index.copy_(torch.tensor([1, 3, 3]))
    expected = x[index].clone()
    replay()
    assert torch.equal(y, expected)
    assert x[1].tolist() == [0.5, 0.5]


def test_a_piece_without_operations_is_dropped() -> None:
    lane = RecordedLane()
    lane.begin()
    torch.randn(4).view(2, 2)  # an operation and a view
    assert lane.end() is not None
    lane.begin()
    assert lane.end() is None


def test_graphs_of_a_lane_share_the_memory_of_their_temporaries() -> None:
    """As in a CUDA pool: many buckets need no more memory than the largest."""
    alone = toy.make_runner(buckets=((64, 4),))
    many = toy.make_runner(buckets=tuple((rows, 4) for rows in (64, 56, 48, 40, 32, 24, 16, 8)))
    assert len(many.graphs) == 8
    assert many.lane.nbytes <= 1.2 * alone.lane.nbytes
    assert [graph.nbytes for graph in many.graphs][1:] == [0] * 7, "the smaller ones fit into what the largest took"
    assert verify(many).is_right


def test_a_process_that_captures_does_not_import_the_compiler_of_torch() -> None:
    """The import would take two seconds in every server and every rank."""
    code = """
import sys
import torch
from saccade.graphs.recorded import RecordedLane

lane = RecordedLane()
lane.begin()
y = torch.ones(3) + 1
piece = lane.end()
print("torch._dynamo" in sys.modules, piece is not None)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.split() == ["False", "True"]

"""Collectives on a CPU, alone and inside graphs that are audited and verified."""

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from saccade.errors import AddressError, ConfigError, GraphError
from saccade.graphs import Frame, GraphRunner, Phase, Watched, audit, verify
from saccade.graphs.recorded import RecordedLane
from saccade.layers.layer import EXCHANGE_MEMORY, Layer, new_exchange
from saccade.layers.parallel import Groups, ParallelGroup
from tests.graphs import toy
from tests.ranks import assert_near

ROOM = 64 * 2**10
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((4, 8), (3, 5), (1,), (2, 3, 7), (0, 4))


def brought(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """The input of a rank. Every rank can compute it for all ranks, and so knows the right result."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(shape, generator=generator).to(dtype)


def total(size: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.stack([brought(rank, shape, dtype, seed).float() for rank in range(size)]).sum(0)


def close(found: Tensor, right: Tensor) -> None:
    assert_near(found.float(), right, {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}[found.dtype])


def reserve(groups: Groups) -> None:
    """Collectives need reserved memory, and all ranks must reserve the same size."""
    group = groups.language
    with pytest.raises(AddressError, match="4 bytes and 0 are reserved"):
        group.all_reduce(torch.ones(1))
    with pytest.raises(ConfigError, match=f"rank {group.rank} reserves {ROOM + group.rank} bytes and another rank"):
        group.reserve(ROOM + group.rank)
    for each in (groups.language, groups.vision):
        each.reserve(ROOM)
    with pytest.raises(AddressError, match=rf"{ROOM + 4} bytes and {ROOM} are reserved; .* largest pass"):
        group.all_reduce(torch.ones(ROOM // 4 + 1))
    close(group.all_reduce(torch.ones(ROOM // 4)), torch.full((ROOM // 4,), float(group.size)))


def sizes_that_differ(groups: Groups) -> None:
    """gloo alone would abort one process and mix up tensors in the others. Here the ranks can continue."""
    group = groups.language
    for call in (group.all_reduce, group.all_gather):
        with pytest.raises(GraphError, match=r"ranks pass 4, 8\b.* bytes to one collective"):
            call(torch.ones(1 + group.rank))
        with pytest.raises(GraphError, match=r"ranks pass 12, .*0 bytes to one collective"):
            call(torch.ones(0 if group.rank == group.size - 1 else 3))
    close(group.all_reduce(torch.ones(3)), torch.full((3,), float(group.size)))


def sums(groups: Groups) -> None:
    group = groups.language
    for seed, (dtype, shape) in enumerate((d, s) for d in DTYPES for s in SHAPES):
        x, right = brought(group.rank, shape, dtype, seed), total(group.size, shape, dtype, seed)
        kept = x.clone()
        found = group.all_reduce(x)
        close(found, right)
        assert torch.equal(x, kept), "a sum out of place leaves its input alone"
        assert found.dtype == dtype and group.all_equal(found.float().numpy().tobytes())
        across = x.movedim(0, -1).contiguous().movedim(-1, 0)
        assert torch.equal(group.all_reduce(across), found), "an input need not be contiguous"
        out = torch.full((2, *shape), 7.0, dtype=dtype)
        assert group.all_reduce(x, out[1]).data_ptr() == out[1].data_ptr()
        assert torch.equal(out[1], found) and bool((out[0] == 7).all())
        assert group.all_reduce(x, x) is x and torch.equal(x, found), "in place"


def joins(groups: Groups) -> None:
    group = groups.vision
    shape = (2, 3, 5)
    everyone = [brought(rank, shape, torch.float32) for rank in range(group.size)]
    for dim in (-1, 0, 1):
        right = torch.cat(everyone, dim=dim)
        assert torch.equal(group.all_gather(everyone[group.rank], dim), right)
        across = everyone[group.rank].movedim(0, -1).contiguous().movedim(-1, 0)
        out = torch.empty(right.shape)
        assert group.all_gather(across, dim, out) is out and torch.equal(out, right)


def host(groups: Groups) -> None:
    group = groups.language
    assert group.agree(10 - group.rank) == 10 - (group.size - 1) and group.agree(-(2**62)) == -(2**62)
    assert group.all_equal(b"the same") and not group.all_equal(b"rank %d" % group.rank)
    assert group.control is not None
    assert group.control.gather(b"x" * group.rank) == [b"x" * rank for rank in range(group.size)]
    assert group.control.broadcast({"rank": group.rank}) == {"rank": 0}
    group.barrier()
    said = group.describe()
    assert (said["rank"], said["size"], said["backend"]) == (group.rank, group.size, "gloo")


def replays(groups: Groups) -> None:
    """A replayed sum exchanges the current values, not those of the recording."""
    group, lane = groups.language, RecordedLane()
    static = brought(group.rank, (4, 6), torch.float32, seed=1)
    with lane.session():
        lane.begin()
        summed = group.all_reduce(static * 2)
        joined = group.all_gather(summed + group.rank)
        piece = lane.end()
    assert piece is not None
    names = [node.name for node in piece.nodes()]
    assert names.count("saccade.all_reduce.default") == 1 and names.count("saccade.all_gather.default") == 1
    for seed in (2, 3):
        static.copy_(brought(group.rank, (4, 6), torch.float32, seed))
        piece()
        right = 2 * total(group.size, (4, 6), torch.float32, seed)
        close(summed, right)
        close(joined, torch.cat([right + rank for rank in range(group.size)], dim=-1))


def streams(groups: Groups) -> None:
    """Two streams may reach their sums in a different order on each rank, so each stream has its own communicator."""
    found: dict[str, Tensor] = {}

    def run(name: str) -> None:
        group: ParallelGroup = getattr(groups, name)
        seed = {"language": 5, "vision": 6}[name]
        found[name] = group.all_reduce(brought(group.rank, (64, 8), torch.float32, seed))

    names = ["language", "vision"] if groups.language.rank % 2 else ["vision", "language"]
    first = threading.Thread(target=run, args=names[:1])
    first.start()
    first.join(timeout=0.2)  # it waits for a rank that is busy with the other stream
    run(names[1])
    first.join(timeout=60)
    for name, seed in (("language", 5), ("vision", 6)):
        close(found[name], total(groups.language.size, (64, 8), torch.float32, seed))


class Split(nn.Module):
    """The toy encoder followed by an all-reduce, as in a sharded layer."""

    def __init__(self, group: ParallelGroup) -> None:
        super().__init__()
        self.encoder, self.group = toy.Encoder(), group

    def forward(self, frame: Frame) -> dict[str, Tensor]:
        share = self.encoder(frame)["y"] / self.group.size
        return {"y": self.group.all_reduce(share)}


class Owner(Layer):
    def __init__(self, group: ParallelGroup) -> None:
        self.exchange = new_exchange(group)


def split_phase(group: ParallelGroup, **changes: Any) -> Phase:
    body, owner = Split(group), Owner(group)
    phase = toy.make_phase(encoder=body)
    state = Watched.of_module(body) | Watched(dict(owner.parameter_locations()), dict(owner.reference_locations()))
    assert EXCHANGE_MEMORY in state
    return replace(phase, **({"state": state, "writes": frozenset({EXCHANGE_MEMORY})} | changes))


def new_runner(phase: Phase) -> GraphRunner:
    runner = GraphRunner(phase)
    runner.capture_buckets()
    return runner


def checks(groups: Groups) -> None:
    """A correct graph with sums in it passes verification and audit."""
    runner = new_runner(split_phase(groups.language))
    report = verify(runner)
    assert report.is_right, str(report)
    found = audit(runner)
    assert found.is_right, str(found)


def undeclared(groups: Groups) -> None:
    """The audit finds reserved memory that the phase does not declare, or does not declare as written."""
    without = split_phase(groups.language, state=Watched.of_module(Split(groups.language)))
    found = audit(new_runner(replace(without, state=Watched.of_body(without.body))))
    assert "undeclared: " in str(found) and "memory" in str(found)
    found = audit(new_runner(split_phase(groups.language, writes=frozenset())))
    assert f"a replay changes {EXCHANGE_MEMORY!r}" in str(found)


def moved(groups: Groups) -> None:
    """A graph holds the address of the reserved memory. Once that has moved, replays are refused."""
    group = groups.vision
    phase = split_phase(group)
    runner = new_runner(phase)
    values = toy.batch(5, 7, seed=3)
    before = runner.run(values, lambda outputs: outputs["y"].clone())
    held = group.collectives.memory if group.collectives else None  # so that the new memory gets another address
    group.reserve(ROOM)
    with pytest.raises(AddressError, match=EXCHANGE_MEMORY):
        runner.run(values, lambda outputs: outputs["y"].clone())
    del held
    again = new_runner(phase).run(values, lambda outputs: outputs["y"].clone())
    close(again, before)


CASES = {
    each.__name__: each
    for each in (reserve, sizes_that_differ, sums, joins, host, replays, streams, checks, undeclared, moved)
}

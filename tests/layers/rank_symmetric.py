"""The code around torch's symmetric-memory kernels: where tensors are staged, padded and written.

The kernels need GPUs, so stand-ins enforce the same rules here: tensors are contiguous, aligned and of equal sizes, and
nothing is read before all ranks have written.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from saccade.errors import AddressError
from saccade.kernels import symmetric_collectives
from saccade.kernels.symmetric_collectives import ALIGNED_BYTES, SMALLEST_BYTES, SymmetricCollectives
from saccade.layers.parallel import Groups, ParallelGroup
from tests.layers.rank_collectives import DTYPES, SHAPES, brought, close, total

CPU = torch.device("cpu")
TIMES = {"one_shot": [1.0, 1.0, 4.0], "two_shot": [2.0, 2.0, 2.0], "multimem": [3.0, 3.0, 3.0]}


class Handle:
    """The other ranks' memory as it was at the last barrier, so that a read without a barrier is stale."""

    def __init__(self, memory: Tensor, group: dist.ProcessGroup) -> None:
        self.multicast_ptr = 1
        self.memory, self.group = memory, group
        self.seen = torch.zeros(group.size(), memory.numel(), dtype=torch.uint8)

    def barrier(self, channel: int = 0) -> None:
        self.group._allgather_base(self.seen.view(-1), self.memory).wait()

    def get_buffer(self, rank: int, sizes: Any, dtype: torch.dtype, offset: int) -> Tensor:
        count = torch.Size(sizes).numel()
        return self.seen[rank].view(dtype)[offset : offset + count].view(*sizes)


class Kernels:
    """The operations of torch.ops.symm_mem, on the newest handle."""

    def __init__(self) -> None:
        self.handle: Handle

    def rendezvous(self, memory: Tensor, group: dist.ProcessGroup) -> Handle:
        self.handle = Handle(memory, group)
        return self.handle

    def one_shot_all_reduce_out(self, x: Tensor, how: str, name: str, out: Tensor) -> None:
        assert out.untyped_storage().data_ptr() != self.handle.memory.untyped_storage().data_ptr(), "others read it"
        out.copy_(self._total(x, out))

    def two_shot_all_reduce_out(self, x: Tensor, how: str, name: str, out: Tensor) -> None:
        self.one_shot_all_reduce_out(x, how, name, out)

    def two_shot_all_reduce_(self, x: Tensor, how: str, name: str) -> Tensor:
        return x.copy_(self._total(x, x))

    multimem_all_reduce_ = two_shot_all_reduce_

    def _total(self, x: Tensor, out: Tensor) -> Tensor:
        assert x.data_ptr() == self.handle.memory.data_ptr(), "the input is in the reserved memory"
        assert x.dtype in (torch.bfloat16, torch.float32) and x.is_contiguous() and out.is_contiguous()
        assert x.shape == out.shape and x.nbytes % ALIGNED_BYTES == 0 and out.data_ptr() % ALIGNED_BYTES == 0
        self.handle.barrier()
        parts = [self.handle.get_buffer(rank, x.shape, x.dtype, 0) for rank in range(self.handle.group.size())]
        return torch.stack(parts).sum(0, dtype=x.dtype)


class Timed(SymmetricCollectives):
    """Every rank measures different times; all must use rank 0's."""

    def _measure(self, nbytes: int) -> dict[str, float]:
        step = [SMALLEST_BYTES, 4 * SMALLEST_BYTES, 16 * SMALLEST_BYTES].index(nbytes)
        return {name: TIMES[name][step] * (-1 if self._group.rank() else 1) for name in self.algorithms}


def new_group(groups: Groups) -> ParallelGroup:
    kernels, control = Kernels(), groups.language.control
    assert control is not None
    module = cast(Any, symmetric_collectives)
    module.ops = kernels
    module.symmetric = SimpleNamespace(
        empty=lambda n, dtype, device: torch.zeros(n, dtype=dtype), rendezvous=kernels.rendezvous
    )
    torch.cuda.synchronize = lambda device=None: None
    made = dist.new_group(backend="gloo")
    assert isinstance(made, dist.ProcessGroup)
    rank, size = groups.language.rank, groups.language.size
    return ParallelGroup(rank=rank, size=size, collectives=Timed(made, CPU, control), control=control)


def refusal(groups: Groups) -> None:
    """The refusal quotes only the first line of torch's error."""
    group = new_group(groups)
    assert isinstance(group.collectives, Timed) and group.collectives.refusal() == ""

    def fail(memory: Tensor, group: dist.ProcessGroup) -> None:
        raise RuntimeError("no peer access\nException raised from ...")

    cast(Any, symmetric_collectives).symmetric.rendezvous = fail
    assert group.collectives.refusal() == "symmetric memory cannot be used (no peer access)"


def reserved(groups: Groups) -> ParallelGroup:
    group = new_group(groups)
    group.reserve(16 * SMALLEST_BYTES)
    return group


def choices(groups: Groups) -> None:
    group = reserved(groups)
    assert group.describe()["all_reduce"] == [
        {"algorithm": "one_shot", "up_to_bytes": 4 * SMALLEST_BYTES},
        {"algorithm": "two_shot", "up_to_bytes": None},
    ]
    with pytest.raises(AddressError, match="are reserved"):
        group.staging((16 * SMALLEST_BYTES + 1,), torch.float32)


def sums(groups: Groups, algorithm: str) -> None:
    group = reserved(groups)
    assert group.collectives is not None
    by = partial(group.collectives.all_reduce, algorithm=algorithm)
    for seed, (dtype, shape) in enumerate((d, s) for d in DTYPES for s in SHAPES):
        if dtype is torch.float16 and algorithm != "gather":
            continue
        x, right = brought(group.rank, shape, dtype, seed), total(group.size, shape, dtype, seed)
        found = by(x)
        close(found, right)
        assert torch.equal(x, brought(group.rank, shape, dtype, seed))
        assert torch.equal(by(x.movedim(0, -1).contiguous().movedim(-1, 0)), found)
        assert torch.equal(by(staged(group, x)), found)
        inside = staged(group, x)
        assert by(inside, inside) is inside and torch.equal(inside, found), "in place, in the reserved memory"
        for offset in (0, 1, 8):  # aligned and not
            room = torch.full((x.numel() + 16,), 7.0, dtype=dtype)
            out = room[offset : offset + x.numel()].view(shape)
            assert torch.equal(by(x, out), found)
            assert bool((room[:offset] == 7).all()) and bool((room[offset + x.numel() :] == 7).all())
        across = torch.empty_like(x).movedim(0, -1).contiguous().movedim(-1, 0)
        assert torch.equal(by(x, across), found)
        assert by(x, x) is x and torch.equal(x, found)


def staged(group: ParallelGroup, x: Tensor) -> Tensor:
    place = group.staging(tuple(x.shape), x.dtype)
    assert place is not None
    return place.copy_(x)


def joins(groups: Groups) -> None:
    group = reserved(groups)
    for dtype, shape, dim in (
        (torch.bfloat16, (5, 103), -1),
        (torch.float32, (2, 3, 5), 1),
        (torch.float16, (3, 5), 0),
    ):
        everyone = [brought(rank, shape, dtype) for rank in range(group.size)]
        mine, right = everyone[group.rank], torch.cat(everyone, dim=dim)
        assert torch.equal(group.all_gather(mine, dim), right)
        assert torch.equal(group.all_gather(staged(group, mine), dim), right)
        out = torch.empty(right.shape, dtype=dtype)
        assert group.all_gather(mine.movedim(0, -1).contiguous().movedim(-1, 0), dim, out) is out
        assert torch.equal(out, right)
    assert torch.equal(group.all_reduce(torch.ones(3, dtype=torch.float16)), torch.full((3,), 1.0 * group.size).half())


CASES: dict[str, Callable[[Groups], None]] = {
    "refusal": refusal,
    "choices": choices,
    **{f"{name} sums": partial(sums, algorithm=name) for name in ("one_shot", "two_shot", "multimem", "gather")},
    "joins": joins,
}

"""The ranks that share one model: which part each holds, and how they communicate."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from saccade.errors import ConfigError
from saccade.kernels.collectives import Collectives, Control


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelGroup:
    """One rank's view of a tensor-parallel group, for the passes of one stream. Without `collectives` the other ranks
    are simulated: shapes are right, values are not."""

    rank: int = 0
    size: int = 1
    collectives: Collectives | None = None
    control: Control | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, f"rank {self.rank} of {self.size}"

    def reserve(self, nbytes: int) -> None:
        """Reserves memory for the largest tensor of an all-reduce or all-gather. All ranks call it once, with the same
        number, before they run or capture anything."""
        if self.collectives is None:
            return
        if self.agree(nbytes) != -self.agree(-nbytes):
            raise ConfigError(
                f"rank {self.rank} reserves {nbytes} bytes and another rank a different number; all must agree"
            )
        self.collectives.reserve(nbytes)

    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The sum over the ranks, in a new tensor or in `out`, which may be x."""
        if self.collectives is None:
            return x if out is None or out is x else out.copy_(x)
        return self.collectives.all_reduce(x, out)

    def all_gather(self, x: Tensor, dim: int = -1, out: Tensor | None = None) -> Tensor:
        """The ranks' tensors, concatenated along `dim`, in a new tensor or in `out`."""
        if self.collectives is not None:
            return self.collectives.all_gather(x, dim, out)
        return x if self.size == 1 and out is None else torch.cat([x] * self.size, dim=dim, out=out)

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Where to put the input of the next all-reduce; None for anywhere. Valid until the next collective."""
        return None if self.collectives is None else self.collectives.staging(shape, dtype)

    def barrier(self) -> None:
        if self.control is not None:
            self.control.barrier()

    def agree(self, value: int) -> int:
        """The minimum over the ranks."""
        return value if self.control is None else self.control.agree(value)

    def all_equal(self, data: bytes) -> bool:
        """Whether all ranks passed the same bytes."""
        return self.control is None or self.control.all_equal(data)

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order."""
        return [data] if self.control is None else self.control.gather(data)

    def describe(self) -> dict[str, Any]:
        """The rank, the size, and the collectives in use with the reason for them, as plain values."""
        used = {"backend": "none"} if self.collectives is None else self.collectives.describe()
        return {"rank": self.rank, "size": self.size, **used}

    def shard(self, total: int, what: str) -> tuple[int, int]:
        """Start and length of this rank's equal share of `total`."""
        if total % self.size:
            raise ConfigError(
                f"{what} = {total} cannot be split evenly over {self.size} ranks; "
                f"choose a tensor-parallel size that divides it (--tensor-parallel-size)"
            )
        count = total // self.size
        return self.rank * count, count

    def shard_or_share(self, total: int, what: str) -> tuple[int, int]:
        """Like `shard`, but if there are more ranks than items, neighbouring ranks hold the same item."""
        if total < self.size and self.size % total == 0:
            return self.rank * total // self.size, 1
        return self.shard(total, what)

    def spread(self, total: int, what: str, *, multiple: int = 1) -> tuple[int, int, int]:
        """Start and length of this rank's share, and the padded length that all shares have. With several ranks, the
        padded length is a multiple of `multiple`. The last ranks may have less than that, or nothing."""
        if total < self.size:
            raise ConfigError(
                f"{what} = {total} cannot be split over {self.size} ranks; "
                f"choose a tensor-parallel size of at most {total} (--tensor-parallel-size)"
            )
        room = -(-total // (self.size * multiple)) * multiple if self.size > 1 else total
        start = min(self.rank * room, total)
        return start, min(room, total - start), room


ALONE = ParallelGroup()


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The ranks of a model: a group for language passes, and one for vision passes."""

    language: ParallelGroup = ALONE
    vision: ParallelGroup = ALONE

    @classmethod
    def imagined(cls, rank: int, size: int) -> "Groups":
        """The groups of a rank whose peers do not run."""
        group = ParallelGroup(rank=rank, size=size)
        return cls(language=group, vision=group)

    def close(self) -> None:
        """Leaves the group. May be called more than once."""
        if self.language.control is not None and dist.is_initialized():
            dist.destroy_process_group()

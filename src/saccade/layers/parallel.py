"""The ranks that share one model, and how they speak."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from saccade.errors import ConfigError


def _alone(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelGroup:
    """One rank's view of a tensor-parallel group.

    `all_reduce` sums a tensor over the ranks; `all_gather` joins the ranks' tensors along the last axis. Both must be
    capturable where the model is captured. With size 1 neither does anything.
    """

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[Tensor], Tensor] = _alone
    all_gather: Callable[[Tensor], Tensor] = _alone

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, f"rank {self.rank} of {self.size}"

    def shard(self, total: int, what: str) -> tuple[int, int]:
        """Where this rank's equal share of `total` begins, and how long it is."""
        if total % self.size:
            raise ConfigError(
                f"{what} = {total} cannot be split evenly over {self.size} ranks; "
                f"choose a tensor-parallel size that divides it (--tensor-parallel-size)"
            )
        count = total // self.size
        return self.rank * count, count

    def shard_or_share(self, total: int, what: str) -> tuple[int, int]:
        """Like `shard`, but with more ranks than items, neighbouring ranks hold a copy of the same item."""
        if total < self.size and self.size % total == 0:
            return self.rank * total // self.size, 1
        return self.shard(total, what)


ALONE = ParallelGroup()

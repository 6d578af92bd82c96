"""An executor that sums over all ranks with gloo. Ranks find each other through their shared store."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore, ProcessGroupGloo

from saccade.execution.rank_messages import RankExecutor, RankStart

WAIT_S = 300.0


@dataclass(frozen=True)
class Reduce:
    number: int


def join(store: str, rank: int, num_ranks: int) -> Any:
    return ProcessGroupGloo(FileStore(store, num_ranks), rank, num_ranks, timedelta(seconds=WAIT_S))


class GlooExecutor:
    order_types = (Reduce,)

    def __init__(self, store: str, rank: int, num_ranks: int) -> None:
        self._rank = rank
        self._group = join(store, rank, num_ranks)

    def execute(self, order: Reduce) -> None:
        self.digest = ""
        tensor = torch.tensor([order.number * 10.0**self._rank])
        self._group.allreduce([tensor]).wait()
        self.digest = str(tensor.item())


def make(start: RankStart) -> RankExecutor:
    torch.set_num_threads(1)
    made = GlooExecutor(start.store, start.rank, start.num_ranks)
    return RankExecutor(order_types=GlooExecutor.order_types, execute=made.execute, take_digest=lambda: made.digest)

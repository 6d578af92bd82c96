"""A rank beside the first: it builds the same executor for its own share of the model, and obeys what it is sent."""

import traceback
from pathlib import Path
from typing import Any

import msgspec
import torch

from saccade.execution.build import build_executor
from saccade.execution.executor import DeviceExecutor
from saccade.execution.rank_messages import OrderOutcome, RankStart, describe
from saccade.execution.ranks import share_of
from saccade.kernels.dispatch import device_named
from saccade.kernels.packages import import_packages
from saccade.layers.connect import connect
from saccade.layers.parallel import Groups
from saccade.scheduling.orders import ORDER_TYPES, Orders
from saccade.wire.messages import Start


class Follower:
    order_types = ORDER_TYPES

    def __init__(self, executor: DeviceExecutor, groups: Groups) -> None:
        self._executor, self._groups = executor, groups

    @property
    def facts(self) -> Any:
        return msgspec.to_builtins(share_of(self._executor))

    def execute(self, order: Orders) -> OrderOutcome:
        error = ""
        try:
            self._executor.execute(order)
        except Exception as raised:
            traceback.print_exc()
            error = describe(raised)
        return OrderOutcome(digest=self._executor.take_trace(), error=error)

    def close(self) -> None:
        self._groups.close()


def follow(start: RankStart) -> Follower:
    given = msgspec.convert(start.settings["engine"], Start)
    torch.set_num_threads(start.settings["num_threads"])
    device = device_named(given.settings.device)
    if device.type == "cuda":
        device = torch.device("cuda", start.device)
        torch.cuda.set_device(device)
    import_packages()
    groups = connect(rank=start.rank, size=start.num_ranks, store=Path(start.store), device=device)
    part = build_executor(Path(given.folder), given.settings, given.limits, device=device, groups=groups)
    return Follower(part.executor, groups)

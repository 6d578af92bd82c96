"""A rank beside the first: it builds the same executor for its own share of the model, and obeys what it is sent."""

from pathlib import Path

import msgspec
import torch

from saccade.execution.build import build_executor
from saccade.execution.rank_messages import RankExecutor, RankStart
from saccade.execution.ranks import share_of
from saccade.kernels.dispatch import device_named
from saccade.kernels.packages import import_packages
from saccade.layers.connect import connect
from saccade.scheduling.orders import ORDER_TYPES
from saccade.wire.messages import Start


def follow(start: RankStart) -> RankExecutor:
    given = msgspec.convert(start.settings["engine"], Start)
    torch.set_num_threads(start.settings["num_threads"])
    device = device_named(given.settings.device)
    if device.type == "cuda":
        device = torch.device("cuda", start.device)
        torch.cuda.set_device(device)
    import_packages()
    groups = connect(rank=start.rank, size=start.num_ranks, store=Path(start.store), device=device)
    executor, _ = build_executor(Path(given.folder), given.settings, given.limits, device=device, groups=groups)
    return RankExecutor(
        order_types=ORDER_TYPES,
        execute=executor.execute,
        take_digest=executor.take_trace,
        facts=msgspec.to_builtins(share_of(executor)),
        close=groups.close,
    )

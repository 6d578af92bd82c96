"""Connects the ranks and chooses how they exchange tensors."""

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout, _world

from saccade.config import allows_shared_gpu, use_loopback
from saccade.errors import ConfigError
from saccade.kernels.collectives import Collectives, Control
from saccade.kernels.gloo_collectives import GlooCollectives
from saccade.layers.parallel import Groups, ParallelGroup

POLL_S = 0.02
MIN_CONNECT_S = 10.0  # even if the watchdog's limit is shorter: a busy machine takes seconds


def connect(
    *,
    rank: int,
    size: int,
    store: Path,
    device: torch.device,
    timeout_s: float = 600.0,
    connect_s: float = 0.0,
    check: Callable[[], None] = lambda: None,
) -> Groups:
    """Waits for the other ranks of this machine and opens the communicators. A process can be in one such group only.

    `store` is a file in a private folder, the same for all ranks and not yet written. A rank that waits for another for
    longer than `timeout_s`, here or later on the host, raises a RuntimeError. `check` is polled until all ranks have
    arrived, and raises if one never will. Connecting may then take `connect_s`, if that is shorter and not 0.
    """
    if size == 1:
        return Groups()
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)
    use_loopback()
    limit = timedelta(seconds=timeout_s)
    file_store = FileStore(str(store), size)
    file_store.set_timeout(limit)
    _wait_for_ranks(file_store, rank, size, timeout_s, check)
    connect_limit = timedelta(seconds=min(max(connect_s, MIN_CONNECT_S) if connect_s else timeout_s, timeout_s))
    file_store.set_timeout(connect_limit)
    try:
        dist.init_process_group("gloo", store=file_store, rank=rank, world_size=size, timeout=connect_limit)
        control = Control(_new_group("gloo", limit, connect_limit))
        made = [_new_collectives(device, control, limit, connect_limit) for _ in range(2)]
    except BaseException:
        if dist.is_initialized():
            dist.destroy_process_group()
        _world.group_count = 0  # part of group names; ranks that start anew count from 0
        raise
    language, vision = (ParallelGroup(rank=rank, size=size, collectives=one, control=control) for one in made)
    return Groups(language=language, vision=vision)


def _wait_for_ranks(store: FileStore, rank: int, size: int, timeout_s: float, check: Callable[[], None]) -> None:
    """Waits until all ranks have started. Later calls cannot be interrupted: if a rank were missing, they would block
    until their timeout."""
    deadline = monotonic() + timeout_s
    store.set(_arrival_key(rank), "")
    while missing := [other for other in range(size) if not store.check([_arrival_key(other)])]:
        check()
        if monotonic() > deadline:
            raise RuntimeError(f"rank {missing[0]} of {size} did not start within {timeout_s:g} s")
        sleep(POLL_S)


def _arrival_key(rank: int) -> str:
    return f"rank {rank} is here"


def _new_collectives(device: torch.device, control: Control, limit: timedelta, connect_limit: timedelta) -> Collectives:
    if device.type == "cpu":
        return GlooCollectives(_new_group("gloo", limit, connect_limit))
    from saccade.kernels.nccl_collectives import NcclCollectives
    from saccade.kernels.symmetric_collectives import SymmetricCollectives

    places = _places(device, control)
    check_devices(places, may_share=allows_shared_gpu())
    reason = _first_reason(control, refusal(places[dist.get_rank()], places, torch.cuda.can_device_access_peer))
    if not reason:
        made = SymmetricCollectives(_new_group("gloo", limit, connect_limit), device, control)
        if not (reason := _first_reason(control, made.refusal())):
            return made
    if _num_gpus(places) < len(places):
        raise ConfigError(f"{reason}, and ranks that share a GPU cannot use NCCL; give each rank its own GPU")
    return NcclCollectives(_new_group("nccl", limit, limit), device, reason)


def _first_reason(control: Control, reason: str) -> str:
    """The first non-empty reason of any rank: if one rank cannot do something, none does it."""
    return next((found.decode() for found in control.gather(reason.encode()) if found), "")


def _num_gpus(places: Sequence[Mapping[str, Any]]) -> int:
    return len({place["gpu"] for place in places})


def nccl_beside(group: ParallelGroup, device: torch.device) -> Collectives | None:
    """NCCL for the same ranks, for comparison; None on a CPU, if NCCL is in use already, or if ranks share a GPU."""
    if device.type == "cpu" or group.control is None or group.describe()["backend"] == "NCCL":
        return None
    if _num_gpus(_places(device, group.control)) < group.size:
        return None
    from saccade.kernels.nccl_collectives import NcclCollectives

    limit = timedelta(minutes=10)
    return NcclCollectives(_new_group("nccl", limit, limit), device, "for comparison")


def _places(device: torch.device, control: Control) -> list[dict[str, Any]]:
    return [json.loads(each) for each in control.gather(json.dumps(_place(device)).encode())]


def _new_group(backend: str, limit: timedelta, connect_limit: timedelta) -> dist.ProcessGroup:
    """Connects within `connect_limit`; later exchanges and store lookups may take up to `limit`."""
    store = _get_default_store()
    store.set_timeout(connect_limit)
    found = dist.new_group(backend=backend, timeout=connect_limit)
    assert isinstance(found, dist.ProcessGroup), found
    if connect_limit != limit:
        _set_pg_timeout(limit, found)
    store.set_timeout(limit)
    return found


def _place(device: torch.device) -> dict[str, Any]:
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    return {"machine": platform.node(), "index": device.index, "gpu": gpu}


def check_devices(places: Sequence[Mapping[str, Any]], *, may_share: bool) -> None:
    """Raises if two ranks are on the same GPU, unless they may share it."""
    for (i, one), (j, other) in combinations(enumerate(places), 2):
        if one["gpu"] == other["gpu"] and not may_share:
            raise ConfigError(
                f"ranks {i} and {j} are both on GPU {one['index']} of {one['machine']}; give each rank its own "
                f"GPU, or use fewer ranks (--tensor-parallel-size)"
            )


def refusal(
    mine: Mapping[str, Any], places: Sequence[Mapping[str, Any]], can_access: Callable[[int, int], bool]
) -> str:
    """Why this rank cannot use symmetric memory, or an empty string if it is worth trying."""
    for other in places:
        if other["machine"] != mine["machine"]:
            return f"ranks are on different machines, {mine['machine']} and {other['machine']}"
        if other["gpu"] != mine["gpu"] and not can_access(mine["index"], other["index"]):
            return f"GPU {mine['index']} cannot read the memory of GPU {other['index']}"
    return ""

"""The ranks of a tensor-parallel engine: started by rank 0, each on its device, and checked against each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from saccade.config import allows_shared_gpu
from saccade.errors import ConfigError, GraphError, SaccadeError
from saccade.execution.executor import DeviceExecutor, ExecutorSettings
from saccade.execution.logits import MAX_SCORED_ROWS
from saccade.execution.rank_processes import OnDeath, RankPlan, RankProcesses
from saccade.execution.state import StateSizes
from saccade.graphs import GraphRunner
from saccade.kernels.dispatch import kernels_for
from saccade.layers.layer import Placement
from saccade.layers.parallel import Groups, ParallelGroup
from saccade.models.config import Config
from saccade.models.quantization import Quantize, read_formats
from saccade.models.registry import read_spec
from saccade.models.vlm import Model
from saccade.scheduling.orders import ORDER_TYPES
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings
from saccade.wire.tensor_parallel import RankShare, TensorParallel

META = torch.device("meta")
FACTORY = "saccade.execution.follower:follow"
GONE_S = 3.0  # for a rank to be seen to be gone after an exchange with it failed
ANSWER_SHARE = 0.8  # of the watchdog's time: rank 0 names the rank that hangs before the front end gives up on rank 0


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes of all ranks but the first, and the device of the first."""

    processes: RankProcesses
    device: torch.device

    @property
    def store(self) -> str:
        return self.processes.store

    def wait_ready(self) -> list[RankShare]:
        """What each of them holds."""
        return [msgspec.convert(facts, RankShare) for facts in self.processes.wait_ready()]

    def require(self) -> None:
        """Raises if one of them is gone."""
        self.processes.behind()

    def explain(self, error: BaseException) -> BaseException:
        """Why rank 0 failed while it built. An error of our own speaks for itself; any other, or one that was caused by
        such, may have its reason in a rank that is gone, which is found out a moment later."""
        root = error.__cause__ or error
        if isinstance(root, SaccadeError) or not isinstance(root, Exception):
            return error
        try:
            self.processes.wait_gone(GONE_S)
        except SaccadeError as reason:
            return reason
        return error

    def close(self) -> None:
        self.processes.close()


def share_of(executor: DeviceExecutor) -> RankShare:
    """What the rank of this executor holds."""
    model = executor.state.model
    return RankShare(
        rank=model.place.group.rank, weights_bytes=model.parameter_bytes(), num_blocks=executor.state.num_blocks
    )


def describe_ranks(model: Model, groups: Groups, held: Sequence[RankShare]) -> TensorParallel:
    encoder = {"encoder_mode": model.encoder_mode or "", "encoder_reason": model.why_whole}
    return msgspec.convert({**groups.language.describe(), **encoder, "held": msgspec.to_builtins(held)}, TensorParallel)


def start_ranks(
    folder: Path, settings: EngineSettings, limits: SchedulerSettings, device: torch.device, on_death: OnDeath
) -> Ranks:
    """Start the other ranks. They begin to build at once, and rank 0 must too: ranks wait for each other on the way."""
    size = settings.tensor_parallel_size
    check_division(folder, settings)
    devices = devices_for(size, device)
    given = {
        "folder": str(folder),
        "settings": msgspec.to_builtins(settings),
        "limits": msgspec.to_builtins(limits),
        "num_threads": torch.get_num_threads(),
    }
    plan = RankPlan(
        num_ranks=size,
        factory=FACTORY,
        order_types=ORDER_TYPES,
        settings=given,
        devices=devices,
        answer_s=settings.watchdog_timeout_s * ANSWER_SHARE,
    )
    first = torch.device("cuda", devices[0]) if device.type == "cuda" else device
    return Ranks(RankProcesses(plan, on_death), first)


def check_division(folder: Path, settings: EngineSettings) -> None:
    """Raises where the model cannot be divided, before processes are started that would all say so."""
    group = ParallelGroup(size=settings.tensor_parallel_size)
    config = Config.read(folder / "config.json")
    family, spec = read_spec(config)
    asked = Quantize(language=settings.quantization, vision=settings.mm_encoder_quantization)
    place = Placement(
        kernels=kernels_for("cpu", torch.float32),
        device=META,
        dtype=torch.float32,
        group=group,
        formats=read_formats(config, family.renames, asked),
    )
    Model(place, spec, encoder_mode=settings.mm_encoder_tp_mode)  # type: ignore[arg-type]


def devices_for(size: int, device: torch.device) -> tuple[int, ...]:
    """The device of each rank."""
    if device.type != "cuda":
        return tuple(range(size))
    count, first = torch.cuda.device_count(), device.index or 0
    if allows_shared_gpu():
        return tuple(range(first, first + size)) if first + size <= count else (first,) * size
    if first + size > count:
        raise ConfigError(
            f"{size} ranks need {size} GPUs, from cuda:{first} on; this machine has {count} "
            "(--tensor-parallel-size, --device)"
        )
    return tuple(range(first, first + size))


def reserve_exchange(model: Model, settings: ExecutorSettings, sizes: StateSizes) -> None:
    """Make room for what ranks exchange in the largest passes."""
    model.reserve(**_largest_passes(model, settings, sizes))


def exchange_bytes(model: Model, settings: ExecutorSettings, sizes: StateSizes) -> int:
    """Memory of one rank that its tensors pass through on their way to the others."""
    return sum(model.exchanged_bytes(**_largest_passes(model, settings, sizes)))


def _largest_passes(model: Model, settings: ExecutorSettings, sizes: StateSizes) -> dict[str, int]:
    """Rows, rows of logits and patches; passes without a graph are included."""
    unit = 0 if model.spec.vision is None else model.spec.vision.unit
    longest = max(settings.max_units, settings.largest_frame(sizes.max_blocks * sizes.block_size))
    logit_rows = max(sizes.max_sequences, MAX_SCORED_ROWS)
    return {"rows": settings.max_tokens, "logit_rows": logit_rows, "patches": longest * unit}


@torch.no_grad()
def check_ranks(executor: DeviceExecutor, groups: Groups) -> None:
    """Check that all ranks get the same bits from the same pass: each picks tokens for itself, so they would drift
    apart."""
    if groups.language.size == 1:
        return
    for runner in executor.phases:
        found = groups.language.gather(_digest(executor, runner))
        other = next((rank for rank, digest in enumerate(found) if digest != found[0]), 0)
        if other:
            raise GraphError(
                f"rank {other} got other results than rank 0 from the same {runner.phase.name} pass; they would answer "
                "different tokens"
            )


def _digest(executor: DeviceExecutor, runner: GraphRunner) -> bytes:
    """Digest of what the smallest bucket gives for its example: outputs, and logits where there are any."""
    phase = runner.phase
    values = runner.example_values(runner.catalogue.shape.ordered[0])
    phase.set_up(values)
    found = sha256()

    def note(outputs: "dict[str, Tensor]") -> None:
        for tensor in (*outputs.values(), *phase.written(values).values()):
            found.update(np.ascontiguousarray(tensor.detach().float().cpu().numpy()).tobytes())

    with executor.in_order(runner):
        runner.run(values, note)  # type: ignore[arg-type]
    return found.digest()

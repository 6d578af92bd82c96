"""The ranks of a tensor-parallel engine: rank 0 starts and directs the others, and their results are compared."""

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from saccade.config import allows_shared_gpu
from saccade.errors import ConfigError, GraphError
from saccade.execution.executor import DeviceExecutor, ExecutorSettings
from saccade.execution.logits import MAX_SCORED_ROWS
from saccade.execution.rank_messages import OrderOutcome, describe
from saccade.execution.rank_processes import OnDeath, RankPlan, RankProcesses
from saccade.execution.shadow_file import digest_of
from saccade.execution.state import StateSizes
from saccade.graphs import GraphRunner
from saccade.kernels.dispatch import kernels_for
from saccade.layers.formats import Formats
from saccade.layers.layer import ALL_PLAIN, Placement
from saccade.layers.parallel import Groups, ParallelGroup
from saccade.models.model_spec import ModelSpec
from saccade.models.vlm import Model
from saccade.scheduling.orders import ORDER_TYPES, Orders
from saccade.wire.messages import StartEngine
from saccade.wire.tensor_parallel import RankShare, TensorParallel
from saccade.wire.trace_records import TracedPass

FACTORY = "saccade.execution.build:follow"
CALIBRATION_ROUNDS = 5  # ranks that measure together must run equally many rounds
ANSWER_SHARE = 0.8  # of the watchdog timeout, so that rank 0 names a hung rank before the front end gives up on it


class RankedExecutor:
    """Rank 0 of several: forwards each order, then executes it. Later the outcomes of all ranks are compared."""

    def __init__(self, executor: DeviceExecutor, processes: RankProcesses) -> None:
        self._executor, self._processes = executor, processes
        self._number = 0  # of the newest order

    def execute(self, orders: Orders) -> Any:
        self._number = number = self._processes.send(orders)
        error = ""
        try:
            return self._executor.execute(orders)
        except BaseException as raised:
            error = describe(raised)
            raise
        finally:
            self._processes.record(number, OrderOutcome(digest=self._executor.take_trace(), error=error))

    def snapshots(self) -> dict[str, dict[str, Any]]:
        """Of rank 0 only; the others replay the same graphs."""
        return self._executor.snapshots()

    def time_passes(self) -> None:
        self._executor.time_passes()

    def take_passes(self) -> tuple[list[TracedPass], int]:
        """Of rank 0 only."""
        return self._executor.take_passes()

    def require_device(self) -> None:
        """Call after an error. Returns if all ranks had the same one, or raises which rank diverged."""
        self._executor.require_device()
        if self._number:
            self._processes.settle(self._number)


def share_of(executor: DeviceExecutor) -> RankShare:
    model = executor.state.model
    return RankShare(
        rank=model.place.group.rank, weights_bytes=model.parameter_bytes(), num_blocks=executor.state.num_blocks
    )


def describe_ranks(model: Model, groups: Groups, held: Sequence[RankShare]) -> TensorParallel:
    encoder = {"encoder_mode": model.encoder_mode or "", "encoder_reason": model.why_whole}
    return msgspec.convert({**groups.language.describe(), **encoder, "held": msgspec.to_builtins(held)}, TensorParallel)


def start_ranks(
    engine: StartEngine, spec: ModelSpec, formats: Formats, device: torch.device, on_death: OnDeath
) -> RankProcesses:
    """Starts the other ranks. They build at once, and rank 0 must too, because ranks wait for each other."""
    settings, size = engine.settings, engine.settings.tensor_parallel_size
    check_division(spec, size, settings.mm_encoder_tp_mode, formats)  # before starting processes that would only fail
    plan = RankPlan(
        num_ranks=size,
        factory=FACTORY,
        order_types=ORDER_TYPES,
        settings={"engine": msgspec.to_builtins(engine), "num_threads": torch.get_num_threads()},
        devices=devices_for(size, device),
        answer_s=settings.watchdog_timeout_s * ANSWER_SHARE,
    )
    return RankProcesses(plan, on_death)


def check_division(spec: ModelSpec, size: int, encoder_mode: str, formats: Formats = ALL_PLAIN) -> None:
    """Raises a ConfigError if the model cannot be divided over this many ranks. Quantization blocks may fit one rank's
    share but not another's, so with them every rank is checked."""
    kernels, meta = kernels_for("cpu", torch.float32), torch.device("meta")
    for rank in range(size if formats.multiple > 1 else 1):
        group = ParallelGroup(rank=rank, size=size)
        place = Placement(kernels=kernels, device=meta, dtype=torch.float32, group=group, formats=formats)
        Model(place, spec, encoder_mode=encoder_mode)  # type: ignore[arg-type]


def devices_for(size: int, device: torch.device) -> tuple[int, ...]:
    if device.type != "cuda":
        return tuple(range(size))
    count, first = torch.cuda.device_count(), device.index or 0
    if first + size <= count:
        return tuple(range(first, first + size))
    if allows_shared_gpu():
        return (first,) * size
    raise ConfigError(
        f"{size} ranks need {size} GPUs, starting at cuda:{first}; this machine has {count} "
        "(--tensor-parallel-size, --device)"
    )


def largest_passes(model: Model, settings: ExecutorSettings, sizes: StateSizes) -> dict[str, int]:
    """The most rows, rows of logits and patches that ranks exchange in a pass, with or without a graph."""
    unit = 0 if model.spec.vision is None else model.spec.vision.unit
    longest = max(settings.max_units, settings.largest_frame(sizes.max_blocks * sizes.block_size))
    logit_rows = max(sizes.max_sequences, MAX_SCORED_ROWS)
    return {"rows": settings.max_tokens, "logit_rows": logit_rows, "patches": longest * unit}


@torch.no_grad()
def check_ranks(executor: DeviceExecutor, groups: Groups) -> None:
    """Checks that all ranks get the same bits from a pass. Each samples by itself, so they could diverge."""
    if groups.language.size == 1:
        return
    for runner in executor.phases:
        found = groups.language.gather(_digest(runner).encode())
        other = next((rank for rank, digest in enumerate(found) if digest != found[0]), 0)
        if other:
            raise GraphError(
                f"rank {other} and rank 0 got different results from the same {runner.phase.name} pass, so they would "
                "sample different tokens"
            )


def _digest(runner: GraphRunner) -> str:
    """Digest of the outputs and written state of the smallest bucket's example."""
    phase, values = runner.phase, runner.example_values(runner.catalogue.shape.ordered[0])
    phase.set_up(values)
    return runner.run(values, lambda outputs: digest_of({**outputs, **phase.written(values)}))

"""Builds several engines, one after the other, on the same ranks, because starting a process takes longer than building
a tiny model. `Build` goes to all ranks like any order; they build in lockstep, as when a server starts."""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from saccade.execution import sizes
from saccade.execution.assembly import new_engine
from saccade.execution.build import build_executor
from saccade.execution.executor import DeviceExecutor, ExecutorSettings
from saccade.execution.rank_messages import OrderOutcome, RankExecutor, RankStart
from saccade.execution.rank_processes import RankPlan, RankProcesses
from saccade.execution.ranks import RankedExecutor
from saccade.execution.resolving import Resolved
from saccade.execution.sizes import encoder_index_for
from saccade.layers.connect import connect
from saccade.layers.parallel import Groups
from saccade.models.weights import ONE_RANK
from saccade.scheduling.buckets import PART_UNITS
from saccade.scheduling.engine import Engine
from saccade.scheduling.orders import ORDER_TYPES
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings
from saccade.wire.messages import StartEngine
from tests.engine.wrong_graphs import spoil_outputs

BOUND_S = 300.0  # a wait longer than this is a hang, whatever else the machine does
ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
LIMITS = SchedulerSettings(
    max_num_seqs=2,
    max_num_batched_tokens=16,
    max_model_len=96,
    encoder_budget_tokens=20,
    prefill_chunk_tokens=12,
)


@dataclass(frozen=True)
class Build:
    folder: str
    verify: str
    shadow: float = 0.0
    shadow_dir: str = ""
    encoder_mode: str = "auto"
    part_units: int = PART_UNITS


@dataclass(frozen=True)
class Spoil:
    """Makes the graphs of a phase wrong, on one rank only."""

    rank: int
    phase: str


ALL_ORDERS = (Build, Spoil, *ORDER_TYPES)


class Builder:
    """A rank that builds an executor for every `Build`, and executes other orders with the newest."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._executor: DeviceExecutor | None = None

    def execute(self, order: Any) -> None:
        if isinstance(order, Build):
            self._executor, _ = build(order, self._groups)
        elif isinstance(order, Spoil):
            spoil(order, self._executor, self._groups.language.rank)
        else:
            assert self._executor is not None, "the first order is to build"
            self._executor.execute(order)

    def take_digest(self) -> str:
        return "" if self._executor is None else self._executor.take_trace()


def make(start: RankStart) -> RankExecutor:
    torch.set_num_threads(1)
    groups = connect(rank=start.rank, size=start.num_ranks, store=Path(start.store), device=CPU)
    made = Builder(groups)
    return RankExecutor(order_types=ALL_ORDERS, execute=made.execute, take_digest=made.take_digest, close=groups.close)


def build(order: Build, groups: Groups = ONE_RANK) -> tuple[DeviceExecutor, Resolved]:
    settings = EngineSettings(
        device="cpu",
        block_size=8,
        kv_cache_tokens=192,
        encoder_cache_tokens=128,
        verify=order.verify,
        shadow=order.shadow,
        shadow_dir=order.shadow_dir,
        mm_encoder_tp_mode=order.encoder_mode,
        tensor_parallel_size=groups.language.size,
    )
    with patch.object(sizes, "ExecutorSettings", partial(ExecutorSettings, part_units=order.part_units)):
        return build_executor(StartEngine(order.folder, settings, LIMITS), CPU, groups)


def spoil(order: Spoil, executor: DeviceExecutor | None, rank: int) -> None:
    assert executor is not None, "the first order is to build"
    if rank == order.rank:
        spoil_outputs(next(runner for runner in executor.phases if runner.phase.name == order.phase))


def engine_of(executor: DeviceExecutor, resolved: Resolved, processes: RankProcesses | None = None) -> Engine:
    return new_engine(
        executor,
        resolved.limits,
        encoder_index_for(resolved.settings, resolved.limits),
        fingerprint=b"tiny",
        ordered=None if processes is None else RankedExecutor(executor, processes),
    )


@dataclass(frozen=True)
class Ranks:
    processes: RankProcesses
    groups: Groups

    def engine(self, folder: Path, verify: str = "off", **more: Any) -> Engine:
        order = Build(str(folder), verify, **more)
        number = self.processes.send(order)
        executor, resolved = build(order, self.groups)
        self._end(number)
        return engine_of(executor, resolved, self.processes)

    def spoil(self, engine: Engine, order: Spoil) -> None:
        number = self.processes.send(order)
        spoil(order, executor_of(engine), rank=0)
        self._end(number)

    def _end(self, number: int) -> None:
        self.processes.record(number, OrderOutcome())
        self.processes.wait(number, BOUND_S)


@contextmanager
def started(num_ranks: int) -> Iterator[Ranks]:
    """Rank 0 is this process."""
    plan = RankPlan(
        num_ranks=num_ranks,
        factory=f"{__name__}:make",
        order_types=ALL_ORDERS,
        environment={"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
        start_s=BOUND_S,
        answer_s=BOUND_S,
    )
    torch.set_num_threads(1)
    with closing(RankProcesses(plan, lambda error: None)) as processes:
        store = Path(processes.store)
        groups = connect(rank=0, size=num_ranks, store=store, device=CPU, check=processes.check)
        try:
            processes.wait_ready()
            yield Ranks(processes, groups)
        finally:
            groups.close()


def executor_of(engine: Engine) -> DeviceExecutor:
    assert isinstance(engine.executor, RankedExecutor), "it has several ranks"
    return engine.executor._executor


def python_path() -> str:
    """The PYTHONPATH of a process that imports the tests."""
    return os.pathsep.join(filter(None, (str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", ""))))

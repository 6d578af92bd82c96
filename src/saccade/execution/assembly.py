"""Assembles an engine. Servers, dry runs, benchmarks and tests all use it."""

from typing import Any

from saccade.cache.blocks import BlockPool
from saccade.cache.encoder import EncoderIndex
from saccade.cache.prefix import PrefixCache
from saccade.execution.executor import DeviceExecutor, ExecutorSettings
from saccade.execution.state import StateSizes, new_state
from saccade.kernels.dispatch import SamplingKernels, sampling_for
from saccade.models.vlm import Model
from saccade.scheduling.engine import Engine
from saccade.scheduling.executing import Executor
from saccade.scheduling.scheduler import Scheduler
from saccade.wire.engine_settings import SchedulerSettings


def new_executor(
    model: Model, sizes: StateSizes, settings: ExecutorSettings, sampling: SamplingKernels | None = None
) -> DeviceExecutor:
    """An executor with all its buffers, but no captured graphs."""
    return DeviceExecutor(new_state(model, sampling or sampling_for(model.place.device), sizes), settings)


def new_engine(
    executor: DeviceExecutor,
    limits: SchedulerSettings,
    encoder: EncoderIndex,
    *,
    num_blocks: int | None = None,
    fingerprint: bytes | None = None,
    ordered: Executor | None = None,
    **of_engine: Any,
) -> Engine:
    """A `fingerprint` of everything besides tokens that keys and values depend on turns prefix caching on. `ordered`
    gets the orders instead of `executor`, e.g. to forward them to other ranks. The rest goes to `Engine`."""
    state = executor.state
    pool = BlockPool(num_blocks or state.num_blocks, state.block_size)
    prefix = None if fingerprint is None else PrefixCache(pool, model=fingerprint)
    return Engine(
        ordered or executor,
        executor.composer(),
        Scheduler(limits, pool=pool, encoder=encoder, prefix=prefix),
        **of_engine,
    )

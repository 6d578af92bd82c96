"""Settings resolved for a model and a device, and how many KV blocks fit into what memory is left."""

import gc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from saccade.errors import ConfigError
from saccade.execution.assembly import new_executor
from saccade.execution.executor import ExecutorSettings
from saccade.execution.sizes import (
    block_bytes,
    blocks_that_fit,
    executor_settings_for,
    shadow_bytes_for,
    state_sizes_for,
    wanted_blocks,
)
from saccade.execution.state import StateSizes
from saccade.inputs.media_settings import read_image_settings, read_video_settings
from saccade.models.vlm import Model
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings

MAX_RECORDED_BYTES = 256 * 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """Settings resolved for a model and a kind of device, and all derived sizes except the KV cache's."""

    settings: EngineSettings
    limits: SchedulerSettings
    executor: ExecutorSettings
    sizes: StateSizes
    shadow_bytes: Mapping[str, int]


def resolve(
    folder: Path, settings: EngineSettings, limits: SchedulerSettings, model: Model, *, is_cuda: bool
) -> Resolved:
    """On a CPU only small models get graphs by default: recordings hold every temporary and save no time."""
    is_large = not is_cuda and model.parameter_bytes() > MAX_RECORDED_BYTES
    if is_large and not settings.graphs:
        settings = replace(settings, enforce_eager=True)
    limits = limits.resolved(is_cuda=is_cuda, max_position=model.spec.max_position)
    images, videos, vision = read_image_settings(folder), read_video_settings(folder), model.spec.vision
    return Resolved(
        settings=settings,
        limits=limits,
        executor=executor_settings_for(settings, limits, images, videos, vision, is_cuda=is_cuda),
        sizes=state_sizes_for(settings, limits, is_cuda=is_cuda),
        shadow_bytes=shadow_bytes_for(settings, is_cuda=is_cuda, has_vision=vision is not None),
    )


def num_blocks(model: Model, resolved: Resolved) -> int:
    """KV cache blocks, including block 0 for padding: as configured, or as many as memory allows."""
    settings, longest, block_size = resolved.settings, resolved.limits.max_model_len, resolved.sizes.block_size
    if settings.kv_cache_tokens or model.place.device.type != "cuda":
        count = wanted_blocks(settings, resolved.limits, block_size)
    else:
        count = _measured_blocks(model, resolved)
    if (count - 1) * block_size < longest:
        raise ConfigError(
            f"the KV cache holds {(count - 1) * block_size} tokens; a request may have {longest} (lower "
            "--max-model-len, or raise --kv-cache-tokens or --gpu-memory-utilization)"
        )
    return count


def _measured_blocks(model: Model, resolved: Resolved) -> int:
    """Builds everything except the KV cache once, with the largest graph of each phase, and measures its memory."""
    device, sizes = model.place.device, resolved.sizes
    before = _free_bytes(device)
    bytes_per_block = block_bytes(model, sizes.block_size)
    trial = new_executor(model, sizes, resolved.executor)
    trial.capture(largest_only=True)
    needed = before - _free_bytes(device) - sizes.num_blocks * bytes_per_block + trial.reserve()
    del trial
    gc.collect()
    _, total = torch.cuda.mem_get_info(device)
    free = _free_bytes(device) - total * (1 - resolved.settings.gpu_memory_utilization)
    return blocks_that_fit(free, needed + sum(resolved.shadow_bytes.values()), bytes_per_block)


def _free_bytes(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]

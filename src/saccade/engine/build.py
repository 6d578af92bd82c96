"""From a checkpoint to a running engine: weights, buffers and graphs first, KV blocks from what is left."""

import gc
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import torch

from saccade.cache.blocks import BlockPool
from saccade.cache.encoder import EncoderIndex
from saccade.cache.prefix import PrefixCache
from saccade.engine.engine import Engine
from saccade.engine.runner import Progress, Runner, RunnerSettings
from saccade.engine.scheduler import Scheduler
from saccade.engine.settings import EngineSettings, SchedulerSettings
from saccade.engine.state import StateSizes, new_state
from saccade.errors import ConfigError
from saccade.inputs.generation import GenerationDefaults
from saccade.inputs.processor import Processor
from saccade.kernels.sampling import sampling_for
from saccade.models.vlm import Model
from saccade.models.weights import DTYPES, load_model

PAGE_ROWS = 16
CPU_KV_TOKENS = 16384
HEADROOM_BYTES = 512 * 2**20  # for what libraries take late; measured use stays below it
Report = Callable[[str], None]


def build_engine(
    folder: str | Path,
    settings: EngineSettings,
    limits: SchedulerSettings,
    *,
    processor: Processor,
    report: Report = lambda stage: None,
    progress: Progress | None = None,
) -> Engine:
    device = torch.device(_device(settings))
    report("loading weights")
    model = load_model(folder, device=device, dtype=_dtype(settings, device), load_format=settings.load_format)  # type: ignore[arg-type]
    limits = replace(limits, max_model_len=min(limits.max_model_len, model.spec.max_position))
    block_size = settings.block_size or (128 if device.type == "cuda" else 16)
    runner_settings = RunnerSettings(
        max_tokens=limits.max_num_batched_tokens,
        max_units=min(limits.encoder_budget_tokens, settings.encoder_cache_tokens),
        page_rows=PAGE_ROWS,
        images=processor.images,
        videos=processor.videos,
        modes=settings.phase_modes(),
        strict=settings.graphs_strict,
    )
    sizes = StateSizes(
        num_blocks=2,
        block_size=block_size,
        max_blocks=-(-limits.max_model_len // block_size),
        max_sequences=limits.max_num_seqs,
        num_vision_rows=settings.encoder_cache_tokens,
    )
    report("measuring memory")
    sizes = replace(sizes, num_blocks=_num_blocks(model, settings, limits, sizes, runner_settings))
    report("capturing graphs")
    runner = Runner(new_state(model, sampling_for(device), sizes), runner_settings)
    runner.capture(progress)
    pool = BlockPool(sizes.num_blocks, block_size)
    prefix = PrefixCache(pool, model=_fingerprint(folder, model)) if settings.enable_prefix_caching else None
    encoder = EncoderIndex(settings.encoder_cache_tokens, PAGE_ROWS)
    scheduler = Scheduler(limits, pool=pool, encoder=encoder, prefix=prefix)
    eos = GenerationDefaults.from_folder(Path(folder)).eos_token_ids
    engine = Engine(runner, scheduler, eos_token_ids=eos, seed=settings.seed)
    report("warming up")
    engine.warm_up()
    report("ready")
    return engine


def _num_blocks(
    model: Model,
    settings: EngineSettings,
    limits: SchedulerSettings,
    sizes: StateSizes,
    runner_settings: RunnerSettings,
) -> int:
    """Blocks of the KV cache, block 0 (padding's) included: as asked for, or all that memory leaves."""
    if settings.kv_cache_tokens or model.place.device.type != "cuda":
        wanted = settings.kv_cache_tokens or max(CPU_KV_TOKENS, limits.max_model_len)
        num_blocks = -(-wanted // sizes.block_size) + 1
    else:
        num_blocks = _measured_blocks(model, settings, sizes, runner_settings)
    if (num_blocks - 1) * sizes.block_size < limits.max_model_len:
        raise ConfigError(
            f"the KV cache holds {(num_blocks - 1) * sizes.block_size} tokens; a request may have "
            f"{limits.max_model_len} (lower --max-model-len, or raise --kv-cache-tokens or --gpu-memory-utilization)"
        )
    return num_blocks


def _measured_blocks(model: Model, settings: EngineSettings, sizes: StateSizes, runner_settings: RunnerSettings) -> int:
    """Build everything but the cache once, with the largest graph of each phase, and see what it takes."""
    device = model.place.device
    before = _free_bytes(device)
    block_bytes = _block_bytes(model, sizes)
    trial = Runner(new_state(model, sampling_for(device), sizes), runner_settings)
    trial.capture(largest_only=True)
    needed = before - _free_bytes(device) - sizes.num_blocks * block_bytes
    del trial
    gc.collect()
    _, total = torch.cuda.mem_get_info(device)
    free = _free_bytes(device) - total * (1 - settings.gpu_memory_utilization)
    return int((free - needed - HEADROOM_BYTES) // block_bytes)


def _block_bytes(model: Model, sizes: StateSizes) -> int:
    heads = model.decoder.layers[0].attention.qkv
    row = heads.num_kv_heads * heads.head_dim * model.place.dtype.itemsize
    return 2 * len(model.decoder.layers) * sizes.block_size * row


def _free_bytes(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def _device(settings: EngineSettings) -> str:
    if settings.device != "auto":
        return settings.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _dtype(settings: EngineSettings, device: torch.device) -> torch.dtype | None:
    if settings.dtype == "auto":
        return torch.float32 if device.type == "cpu" else None
    if settings.dtype not in DTYPES:
        raise ConfigError(f"dtype is {settings.dtype!r}; allowed: auto, {', '.join(DTYPES)} (--dtype)")
    return DTYPES[settings.dtype]


def _fingerprint(folder: str | Path, model: Model) -> bytes:
    """Names what is the same for all requests and changes keys and values."""
    named = f"{Path(folder).resolve()} {model.place.dtype} {model.spec}"
    return blake2b(named.encode(), digest_size=32).digest()

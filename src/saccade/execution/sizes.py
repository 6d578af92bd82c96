"""Sizes of everything in an engine, from settings and model alone; used by the engine and by `saccade plan`."""

from saccade.cache.encoder import EncoderIndex
from saccade.errors import ConfigError
from saccade.execution.executor import ExecutorSettings
from saccade.execution.state import StateSizes
from saccade.models.media import ImageSettings, VideoSettings
from saccade.models.model_spec import VisionSpec
from saccade.models.vlm import Model
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings

PAGE_ROWS = 16
CPU_KV_TOKENS = 16384
HEADROOM_BYTES = 512 * 2**20  # for late library allocations; measured use stays below it
GPU_BLOCK_SIZE, CPU_BLOCK_SIZE = 128, 16
# Copies for shadow checks. A decode pass of 64 rows has 40 MB of logits; a vision pass of 1024 rows takes 50 MB in all.
GPU_SHADOW_BYTES = {"language": 256 * 2**20, "vision": 128 * 2**20}
CPU_SHADOW_BYTES = {"language": 16 * 2**20, "vision": 8 * 2**20}


def executor_settings_for(
    settings: EngineSettings,
    limits: SchedulerSettings,
    images: ImageSettings | None,
    videos: VideoSettings | None,
    vision: VisionSpec | None,
    *,
    is_cuda: bool,
) -> ExecutorSettings:
    """Raises a ConfigError if the patches of images or videos do not match the `vision` tower."""
    if vision is not None:
        _check_patches("images", images, vision)
        _check_patches("videos", videos, vision)
    return ExecutorSettings(
        max_tokens=limits.max_num_batched_tokens,
        max_units=min(limits.encoder_budget_tokens, encoder_rows_for(settings, limits)),
        page_rows=PAGE_ROWS,
        images=images,
        videos=videos,
        modes=settings.phase_modes(),
        strict=settings.graphs_strict,
        vision_tiers=settings.vision_tiers(),
        has_few_buckets=not is_cuda,
        has_shadow=settings.shadow > 0,
    )


def state_sizes_for(settings: EngineSettings, limits: SchedulerSettings, *, is_cuda: bool) -> StateSizes:
    """All sizes. The KV cache gets two blocks until it is known how many fit."""
    block_size = settings.block_size or (GPU_BLOCK_SIZE if is_cuda else CPU_BLOCK_SIZE)
    return StateSizes(
        num_blocks=2,
        block_size=block_size,
        max_blocks=-(-limits.max_model_len // block_size),
        max_sequences=limits.max_num_seqs,
        num_vision_rows=encoder_rows_for(settings, limits),
    )


def encoder_rows_for(settings: EngineSettings, limits: SchedulerSettings) -> int:
    """Rows of the encoder cache. Without caching across requests it holds the images of two steps, because the next
    step's images are encoded while the current step still reads its own."""
    return settings.encoder_cache_tokens or 2 * limits.encoder_budget_tokens + PAGE_ROWS


def encoder_index_for(settings: EngineSettings, limits: SchedulerSettings) -> EncoderIndex:
    rows = encoder_rows_for(settings, limits)
    return EncoderIndex(rows, PAGE_ROWS, keeps_idle=settings.encoder_cache_tokens > 0)


def shadow_bytes_for(settings: EngineSettings, *, is_cuda: bool, has_vision: bool) -> dict[str, int]:
    if not settings.shadow:
        return {}
    chosen = GPU_SHADOW_BYTES if is_cuda else CPU_SHADOW_BYTES
    return {name: nbytes for name, nbytes in chosen.items() if has_vision or name != "vision"}


def _check_patches(kind: str, settings: ImageSettings | VideoSettings | None, vision: VisionSpec) -> None:
    """Refuses patches whose shape or order differs from the tower's, which would misread them."""
    if settings is None:
        return
    for name in ("patch", "temporal_patch", "merge"):
        found, needed = getattr(settings, name), getattr(vision, name)
        if found != needed:
            raise ConfigError(
                f"the processor's files give {kind} a {name}_size of {found}, but config.json gives the vision tower "
                f"{needed}: take both from the same checkpoint, or set {name}_size to {needed}"
            )
    size = settings.fixed_size if isinstance(settings, ImageSettings) else None
    side = vision.grid_side * vision.patch
    if size is not None and size != (side, side):
        raise ConfigError(
            f"the processor's files resize {kind} to {size[0]}x{size[1]} pixels, but the vision tower of config.json "
            f"takes {side}x{side}: take both from the same checkpoint, or set height and width of size to {side}"
        )


def block_bytes(model: Model, block_size: int) -> int:
    heads = model.decoder.layers[0].attention.qkv
    row = heads.num_kv_heads * heads.head_dim * model.place.dtype.itemsize
    return 2 * len(model.decoder.layers) * block_size * row


def blocks_that_fit(free_bytes: float, needed_bytes: float, bytes_per_block: int) -> int:
    """Blocks that fit into the free memory that everything else and the headroom leave."""
    return int((free_bytes - needed_bytes - HEADROOM_BYTES) // bytes_per_block)


def wanted_blocks(settings: EngineSettings, limits: SchedulerSettings, block_size: int) -> int:
    """Blocks, including block 0, for the configured tokens, or for a device whose memory is not measured."""
    wanted = settings.kv_cache_tokens or max(CPU_KV_TOKENS, limits.max_model_len)
    return -(-wanted // block_size) + 1

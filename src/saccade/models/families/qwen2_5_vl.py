"""Qwen2.5-VL: a Qwen2 decoder with M-RoPE in sections, and an RMSNorm tower that mostly attends in windows."""

from dataclasses import replace

from saccade.errors import ConfigError
from saccade.layers.layer_spec import MergerSpec, MLPSpec, NormSpec, VisionBlockSpec, sectioned_axes
from saccade.models.families import llama, qwen2, qwen3_vl
from saccade.models.family import Defaults, Family
from saccade.models.media import CLIP_MEAN, CLIP_STD, MediaDefaults
from saccade.models.model_config import Config
from saccade.models.model_spec import DecoderSpec, VisionSpec
from saccade.models.readers import Rope, read_decoder
from saccade.models.rename import one

TEXT = (
    qwen2.TEXT
    | qwen2.SLIDING
    | {
        "vocab_size": 152_064,
        "hidden_size": 8192,
        "intermediate_size": 29_568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_window_layers": 80,
    }
)


def read_text(config: Config) -> DecoderSpec:
    text = config.text
    rope = Rope.read(text, default_base=1_000_000.0)
    axes = sectioned_axes(rope.sections or (16, 24, 24))
    decoder = qwen2.with_qkv_bias(read_decoder(text, rope=rope, axes=axes, windows=qwen2.read_windows(text)))
    return replace(decoder, tied_head=decoder.tied_head or config.get("tie_word_embeddings", False))


def read_vision(whole: Config) -> VisionSpec:
    config = whole.sub("vision_config")
    width, merge = config.size("hidden_size"), config.size("spatial_merge_size")
    patch, norm = config.size("patch_size"), NormSpec(eps=1e-6)
    window = config.size("window_size") // patch // merge
    if not window:
        raise ConfigError(
            f"{config.where}: window_size is {config.size('window_size')}; it must be at least {patch * merge}, "
            f"the width of a merged patch (patch_size times spatial_merge_size)"
        )
    mlp = MLPSpec(width=config.size("intermediate_size"), activation=config.activation("hidden_act"), bias=True)
    return VisionSpec(
        block=VisionBlockSpec(width=width, num_heads=config.size("num_heads"), norm=norm, mlp=mlp),
        depth=config.depth("depth"),
        patch=patch,
        temporal_patch=config.size("temporal_patch_size"),
        channels=config.size("in_channels", 3),
        merge=merge,
        patch_bias=False,
        rotary_base=Rope.read(config).base,
        window=window,
        full_layers=frozenset(config.ints("fullatt_block_indexes")),
        projector=MergerSpec(out_width=config.size("out_hidden_size"), norm=norm),
    )


_BLOCK, _OURS = "vision.blocks.{n}", "tower.blocks.{n}"

RULES = (
    one(_BLOCK + ".mlp.down_proj.{w}", _OURS + ".mlp.down.{w}"),
    one(_BLOCK + ".mlp.{p}_proj.{w}", _OURS + ".mlp.gate_up.{p}.{w}"),
)

MERGER_RULES = (
    one("vision.merger.ln_q.{w}", "tower.projector.norm.{w}"),
    one("vision.merger.mlp.0.{w}", "tower.projector.mlp.up.{w}"),
    one("vision.merger.mlp.2.{w}", "tower.projector.mlp.down.{w}"),
)

# Pixel bounds apply to each frame, and every frame is used; Qwen3-VL bounds the whole video and samples its frames.
VIDEO = replace(
    qwen3_vl.VIDEO,
    patch=14,
    mean=CLIP_MEAN,
    std=CLIP_STD,
    min_pixels=128 * 28 * 28,
    max_pixels=28 * 28 * 768,
    budget="frame",
    is_sampled=False,
    fps=None,
    max_video_tokens=128_000,
)
PLACEHOLDERS = replace(qwen3_vl.PLACEHOLDERS, video_text="<|video_pad|>", has_timestamps=False, has_pixel_places=True)
MEDIA = MediaDefaults(image=qwen3_vl.IMAGE, video=VIDEO, placeholders=PLACEHOLDERS)

FAMILY = Family(
    architecture="Qwen2_5_VLForConditionalGeneration",
    model_type="qwen2_5_vl",
    defaults=Defaults(
        text=TEXT,
        vision=qwen3_vl.TOWER
        | {
            "depth": 32,
            "hidden_size": 3584,
            "hidden_act": "silu",
            "intermediate_size": 3420,
            "patch_size": 14,
            "tokens_per_second": 4,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
        top=qwen3_vl.TOKEN_IDS,
    ),
    decoder=read_text,
    vision=read_vision,
    media=MEDIA,
    renames=llama.RENAMES.plus(qwen3_vl.VISION_RULES + MERGER_RULES + RULES, prefixes=qwen3_vl.VISION_PREFIXES),
)

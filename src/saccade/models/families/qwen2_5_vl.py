"""Qwen2.5-VL: a Qwen2 decoder with M-RoPE in sections, and an RMSNorm tower that mostly attends in windows."""

from dataclasses import replace

from saccade.errors import ConfigError
from saccade.layers.rotary import sectioned_axes
from saccade.models.config import MAX_LAYERS, Config, Rope, read_decoder, read_windows
from saccade.models.defaults import QWEN2_5_VL
from saccade.models.families.qwen2 import with_qkv_bias
from saccade.models.families.qwen3_vl import VISION_PREFIXES, VISION_RULES
from saccade.models.family import Family
from saccade.models.rename import DECODER_RULES, PRE_NORM_RULES, TEXT_PREFIXES, Renames, one
from saccade.models.spec import (
    MediaSpec,
    MergerSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    VisionBlockSpec,
    VisionSpec,
)


def read_spec(config: Config, architecture: str) -> ModelSpec:
    text = config.sub("text_config") if config.has("text_config") else config
    rope = Rope.read(text, default_base=1_000_000.0)
    axes = sectioned_axes(rope.sections or (16, 24, 24))
    decoder = with_qkv_bias(read_decoder(text, rope=rope, axes=axes, windows=read_windows(text)))
    return ModelSpec(
        architecture=architecture,
        max_position=text.size("max_position_embeddings"),
        decoder=replace(decoder, tied_head=decoder.tied_head or config.get("tie_word_embeddings", False)),
        vision=read_vision(config.sub("vision_config")),
        media=MediaSpec(
            image_token_id=config.token("image_token_id"),
            video_token_id=config.token("video_token_id"),
            start_token_id=config.token("vision_start_token_id"),
            end_token_id=config.token("vision_end_token_id"),
        ),
    )


def read_vision(config: Config) -> VisionSpec:
    width, merge = config.size("hidden_size"), config.size("spatial_merge_size")
    patch, norm = config.size("patch_size"), NormSpec(eps=1e-6)
    window = config.size("window_size") // patch // merge
    if not window:
        raise ConfigError(
            f"{config.where}: window_size is {config.size('window_size')}; a window holds at least one merged patch, "
            f"which is {patch * merge} pixels wide (patch_size times spatial_merge_size)"
        )
    mlp = MLPSpec(width=config.size("intermediate_size"), activation=config.activation("hidden_act"), bias=True)
    return VisionSpec(
        block=VisionBlockSpec(width=width, num_heads=config.size("num_heads"), norm=norm, mlp=mlp),
        depth=config.size("depth", most=MAX_LAYERS),
        patch=patch,
        temporal_patch=config.size("temporal_patch_size"),
        channels=config.size("in_channels", 3),
        merge=merge,
        patch_bias=False,
        rotary_base=Rope.read(config).base,
        window=window,
        full_layers=frozenset(config.ints("fullatt_block_indexes")),
        projector=MergerSpec(unit=merge * merge, out_width=config.size("out_hidden_size"), norm=norm),
    )


_BLOCK, _OURS = "vision.blocks.{n}", "tower.blocks.{n}"

RULES = (
    one(_BLOCK + ".mlp.down_proj.{w}", _OURS + ".mlp.down.{w}"),
    one(_BLOCK + ".mlp.{p}_proj.{w}", _OURS + ".mlp.gate_up.{p}.{w}"),
    one("vision.merger.ln_q.{w}", "tower.projector.norm.{w}"),
    one("vision.merger.mlp.0.{w}", "tower.projector.mlp.up.{w}"),
    one("vision.merger.mlp.2.{w}", "tower.projector.mlp.down.{w}"),
)

FAMILY = Family(
    architectures=("Qwen2_5_VLForConditionalGeneration",),
    defaults=QWEN2_5_VL,
    spec=read_spec,
    renames=Renames(VISION_PREFIXES + TEXT_PREFIXES, DECODER_RULES + PRE_NORM_RULES + VISION_RULES + RULES),
)

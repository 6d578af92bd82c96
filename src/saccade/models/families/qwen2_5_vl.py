"""Qwen2.5-VL: a Qwen2 decoder with M-RoPE in sections, and an RMSNorm tower that mostly attends in windows."""

from dataclasses import replace

from saccade.layers.rotary import sectioned_axes
from saccade.models.config import Config, Rope, read_decoder, read_windows
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
        max_position=text.need("max_position_embeddings", int),
        decoder=replace(decoder, tied_head=decoder.tied_head or config.get("tie_word_embeddings", False)),
        vision=read_vision(config.sub("vision_config")),
        media=MediaSpec(
            image_token_id=config.need("image_token_id", int),
            video_token_id=config.need("video_token_id", int),
            start_token_id=config.need("vision_start_token_id", int),
            end_token_id=config.need("vision_end_token_id", int),
        ),
    )


def read_vision(config: Config) -> VisionSpec:
    width, merge = config.need("hidden_size", int), config.need("spatial_merge_size", int)
    patch, norm = config.need("patch_size", int), NormSpec(eps=1e-6)
    mlp = MLPSpec(width=config.need("intermediate_size", int), activation=config.activation("hidden_act"), bias=True)
    return VisionSpec(
        block=VisionBlockSpec(width=width, num_heads=config.need("num_heads", int), norm=norm, mlp=mlp),
        depth=config.need("depth", int),
        patch=patch,
        temporal_patch=config.need("temporal_patch_size", int),
        channels=config.get("in_channels", 3),
        merge=merge,
        patch_bias=False,
        rotary_base=Rope.read(config).base,
        window=config.need("window_size", int) // patch // merge,
        full_layers=frozenset(config.ints("fullatt_block_indexes")),
        projector=MergerSpec(unit=merge * merge, out_width=config.need("out_hidden_size", int), norm=norm),
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

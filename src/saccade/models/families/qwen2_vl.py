"""Qwen2-VL: the decoder of Qwen2.5-VL, and a LayerNorm tower without windows."""

from dataclasses import replace

from saccade.layers.layer_spec import MergerSpec, MLPSpec, NormSpec, VisionBlockSpec
from saccade.models.families import llama, qwen2_5_vl, qwen3_vl
from saccade.models.family import Defaults, Family
from saccade.models.model_config import Config
from saccade.models.model_spec import VisionSpec
from saccade.models.readers import Rope
from saccade.models.rename import one


def read_vision(whole: Config) -> VisionSpec:
    """hidden_size is the width of the decoder here, embed_dim that of the tower."""
    config = whole.sub("vision_config")
    width, norm = config.size("embed_dim"), NormSpec(kind="layer", eps=1e-6)
    activation = config.activation("hidden_act")
    mlp = MLPSpec(width=width * config.size("mlp_ratio"), activation=activation, gated=False, bias=True)
    return VisionSpec(
        block=VisionBlockSpec(width=width, num_heads=config.size("num_heads"), norm=norm, mlp=mlp),
        depth=config.depth("depth"),
        patch=config.size("patch_size"),
        temporal_patch=config.size("temporal_patch_size"),
        channels=config.size("in_channels", 3),
        merge=config.size("spatial_merge_size"),
        patch_bias=False,
        rotary_base=Rope.read(config).base,
        projector=MergerSpec(out_width=config.size("hidden_size"), norm=norm),
    )


_BLOCK, _OURS = "vision.blocks.{n}", "tower.blocks.{n}"

RULES = (
    one(_BLOCK + ".mlp.fc1.{w}", _OURS + ".mlp.up.{w}"),
    one(_BLOCK + ".mlp.fc2.{w}", _OURS + ".mlp.down.{w}"),
)

PLACEHOLDERS = replace(qwen2_5_vl.PLACEHOLDERS, has_pixel_places=False)

FAMILY = Family(
    architecture="Qwen2VLForConditionalGeneration",
    model_type="qwen2_vl",
    defaults=Defaults(
        text=qwen2_5_vl.TEXT,
        vision={
            "depth": 32,
            "embed_dim": 1280,
            "hidden_size": 3584,
            "hidden_act": "quick_gelu",
            "mlp_ratio": 4,
            "num_heads": 16,
            "in_channels": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        top=qwen3_vl.TOKEN_IDS,
    ),
    decoder=qwen2_5_vl.read_text,
    vision=read_vision,
    media=replace(qwen2_5_vl.MEDIA, placeholders=PLACEHOLDERS),
    renames=llama.RENAMES.plus(
        qwen3_vl.VISION_RULES + qwen2_5_vl.MERGER_RULES + RULES, prefixes=qwen3_vl.VISION_PREFIXES
    ),
)

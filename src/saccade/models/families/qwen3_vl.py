"""Qwen3-VL, dense and mixture of experts. The tower has LayerNorm, an interpolated grid of learned positions and a 2-D
rotary, and makes deepstack rows for the first decoder layers. The decoder has interleaved M-RoPE and norms on queries
and keys."""

from dataclasses import replace

from saccade.layers.layer_spec import MergerSpec, MLPSpec, NormSpec, VisionBlockSpec, interleaved_axes
from saccade.models.families import llama, qwen2
from saccade.models.families.qwen3 import MOE_ALIASES, MOE_TEXT
from saccade.models.family import Defaults, Family
from saccade.models.media import CLIP_MEAN, CLIP_STD, HALF, ImageSettings, MediaDefaults, Placeholders, VideoSettings
from saccade.models.model_config import Config
from saccade.models.model_spec import DecoderSpec, VisionSpec
from saccade.models.readers import Rope, read_decoder, read_moe, with_qk_norm
from saccade.models.rename import EXPERT_RULES, FUSED_EXPERT_RULES, ROUTER_RULES, Rule, one

TOKEN_IDS = {"image_token_id": 151_655, "video_token_id": 151_656}
TOWER = {"num_heads": 16, "in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 3584}
_TOWER = TOWER | {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}


def read_text(config: Config) -> DecoderSpec:
    text = config.sub("text_config")
    rope = Rope.read(text, default_base=500_000.0)
    decoder = with_qk_norm(read_decoder(text, rope=rope, axes=interleaved_axes(rope.sections or (24, 20, 20))))
    return replace(
        decoder,
        tied_head=config.get("tie_word_embeddings", decoder.tied_head),
        deepstack_levels=len(config.sub("vision_config").ints("deepstack_visual_indexes")),
    )


def read_moe_text(config: Config) -> DecoderSpec:
    return read_moe(config.text, read_text(config), renormalise=True)


def read_vision(whole: Config) -> VisionSpec:
    config = whole.sub("vision_config")
    width, norm = config.size("hidden_size"), NormSpec(kind="layer", eps=1e-6)
    merger = MergerSpec(out_width=config.size("out_hidden_size"), norm=norm)
    inner, activation = config.size("intermediate_size"), config.activation("hidden_act")
    mlp = MLPSpec(width=inner, activation=activation, gated=False, bias=True)
    return VisionSpec(
        block=VisionBlockSpec(width=width, num_heads=config.size("num_heads"), norm=norm, mlp=mlp),
        depth=config.depth("depth"),
        patch=config.size("patch_size"),
        temporal_patch=config.size("temporal_patch_size"),
        channels=config.size("in_channels", 3),
        merge=config.size("spatial_merge_size"),
        grid_side=int(config.size("num_position_embeddings") ** 0.5),
        rotary_base=Rope.read(config).base,
        projector=merger,
        deepstack_layers=config.ints("deepstack_visual_indexes"),
        deepstack_merger=replace(merger, norm_after_merge=True),
    )


_BLOCK, _OURS = "vision.blocks.{n}", "tower.blocks.{n}"
_QKV = tuple(_OURS + f".attention.qkv.{p}." + "{w}" for p in "qkv")

VISION_PREFIXES = (("model.visual.", "vision."), ("visual.", "vision."))

VISION_RULES = (
    one("vision.patch_embed.proj.bias", "tower.patches.bias"),
    Rule("vision.patch_embed.proj.weight", ("tower.patches.weight",), flatten=True),
    one(_BLOCK + ".norm1.{w}", _OURS + ".attention_norm.{w}"),
    one(_BLOCK + ".norm2.{w}", _OURS + ".mlp_norm.{w}"),
    Rule(_BLOCK + ".attn.qkv.{w}", _QKV),
    one(_BLOCK + ".attn.proj.{w}", _OURS + ".attention.out.{w}"),
)

RULES = (
    one("vision.pos_embed.weight", "tower.grid.weight"),
    one(_BLOCK + ".mlp.linear_fc1.{w}", _OURS + ".mlp.up.{w}"),
    one(_BLOCK + ".mlp.linear_fc2.{w}", _OURS + ".mlp.down.{w}"),
    one("vision.merger.norm.{w}", "tower.projector.norm.{w}"),
    one("vision.merger.linear_fc1.{w}", "tower.projector.mlp.up.{w}"),
    one("vision.merger.linear_fc2.{w}", "tower.projector.mlp.down.{w}"),
    one("vision.deepstack_merger_list.{n}.norm.{w}", "tower.deepstack.{n}.norm.{w}"),
    one("vision.deepstack_merger_list.{n}.linear_fc1.{w}", "tower.deepstack.{n}.mlp.up.{w}"),
    one("vision.deepstack_merger_list.{n}.linear_fc2.{w}", "tower.deepstack.{n}.mlp.down.{w}"),
)

IMAGE = ImageSettings(
    patch=14,
    temporal_patch=2,
    merge=2,
    mean=CLIP_MEAN,
    std=CLIP_STD,
    resample="bicubic",
    min_pixels=56 * 56,
    max_pixels=28 * 28 * 1280,
)
VIDEO = VideoSettings(
    patch=16,
    temporal_patch=2,
    merge=2,
    mean=HALF,
    std=HALF,
    resample="bicubic",
    min_pixels=128 * 32 * 32,
    max_pixels=32 * 32 * 768,
    budget="video",
    is_sampled=True,
    fps=2,
    num_frames=None,
    min_frames=4,
    max_frames=768,
    is_capped=False,
    max_video_tokens=768,
)
PLACEHOLDERS = Placeholders(
    image_marker="<|image_pad|>",
    image_text="<|image_pad|>",
    video_marker="<|video_pad|>",
    video_text="<|vision_start|><|video_pad|><|vision_end|>",
    has_timestamps=True,
    is_mrope=True,
)
MEDIA = MediaDefaults(image=IMAGE, video=VIDEO, placeholders=PLACEHOLDERS)

FAMILY = Family(
    architecture="Qwen3VLForConditionalGeneration",
    model_type="qwen3_vl",
    defaults=Defaults(
        text=qwen2.TEXT | {"head_dim": 128, "max_position_embeddings": 128_000}, vision=_TOWER, top=TOKEN_IDS
    ),
    decoder=read_text,
    vision=read_vision,
    media=MEDIA,
    renames=llama.RENAMES.plus(VISION_RULES + RULES, prefixes=VISION_PREFIXES),
)

MOE_FAMILY = Family(
    architecture="Qwen3VLMoeForConditionalGeneration",
    model_type="qwen3_vl_moe",
    defaults=Defaults(
        text=MOE_TEXT
        | {
            "intermediate_size": 5632,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "max_position_embeddings": 128_000,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 4,
            "num_experts": 60,
        },
        vision=_TOWER,
        top=TOKEN_IDS,
        aliases=MOE_ALIASES,
    ),
    decoder=read_moe_text,
    vision=read_vision,
    media=MEDIA,
    renames=FAMILY.renames.plus(ROUTER_RULES + FUSED_EXPERT_RULES + EXPERT_RULES),
)

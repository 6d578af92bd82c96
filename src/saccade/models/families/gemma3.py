"""Gemma-3, text and multimodal.

Sliding-window and global layers each have their own rotary. Norms multiply by 1 + weight and come before and after
attention and MLP. Embeddings are scaled. The rows of an image attend to the whole image. The tower is SigLIP at a fixed
resolution, whose patches are averaged to a few rows per image. As in transformers, final_logit_softcapping applies only
to the text model, and attn_logit_softcapping (of Gemma-2) is ignored.
"""

from dataclasses import replace
from math import isqrt
from typing import Any

from saccade.errors import ConfigError
from saccade.layers.layer_spec import MLPSpec, NormSpec, PoolSpec, VisionBlockSpec
from saccade.models.family import Defaults, Family
from saccade.models.media import HALF, ImageSettings, MediaDefaults, Placeholders
from saccade.models.model_config import Config
from saccade.models.model_spec import DecoderSpec, LayerSpec, VisionSpec
from saccade.models.readers import Rope, read_decoder, spread_window
from saccade.models.rename import DECODER_RULES, IGNORED, POST_NORM_RULES, TEXT_PREFIXES, Renames, Rule, one

TEXT = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
SIGLIP = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}


def read_multimodal(config: Config) -> DecoderSpec:
    """The top-level config says whether the head is tied; text_config's value and its logit cap are ignored."""
    tied_head = config.get("tie_word_embeddings", True)
    return replace(read_text(config.sub("text_config")), tied_head=tied_head, logit_softcap=None)


def read_text(config: Config) -> DecoderSpec:
    if config.get("use_bidirectional_attention", False):
        raise ConfigError(
            f"{config.where}: use_bidirectional_attention is true; only causal attention is supported, and such a "
            f"model embeds text rather than generating it"
        )
    # Gemma-3 reads hidden_activation and ignores hidden_act.
    plain = read_decoder(
        Config(dict(config.values) | {"hidden_act": config.need("hidden_activation", str)}, config.where),
        rope=Rope(1.0, None, ()),
    )
    norm = replace(plain.norm, offset=1.0)
    windows, mlp = _windows(config), plain.layers[0].mlp
    local, whole = _ropes(config)
    if local.gain != whole.gain:
        raise ConfigError(f"{config.where}: yarn in some layers only is not supported; use linear, as Gemma-3 does")
    scale = config.positive("query_pre_attn_scalar") ** -0.5 * whole.gain**2
    attention = replace(plain.attention, scale=scale, norm=norm)
    return replace(
        plain,
        attention=attention,
        norm=norm,
        rotaries=(local.spec(attention.head_dim), whole.spec(attention.head_dim)),
        layers=tuple(LayerSpec(mlp=mlp, window=window, rotary=int(window is None)) for window in windows),
        post_norms=True,
        embedding_scale=plain.width**0.5,
        logit_softcap=config.maybe("final_logit_softcapping", float),
    )


def read_vision(config: Config) -> VisionSpec:
    vision = config.sub("vision_config")
    width, patch = vision.size("hidden_size"), vision.size("patch_size")
    side = vision.size("image_size") // patch
    merge = _merge(config, side)
    norm = NormSpec(kind="layer", eps=vision.need("layer_norm_eps", float))
    inner, activation = vision.size("intermediate_size"), vision.activation("hidden_act")
    mlp = MLPSpec(width=inner, activation=activation, gated=False, bias=True)
    num_heads = vision.size("num_attention_heads")
    return VisionSpec(
        block=VisionBlockSpec(width=width, num_heads=num_heads, norm=norm, mlp=mlp),
        depth=vision.depth("num_hidden_layers"),
        patch=patch,
        channels=vision.size("num_channels", 3),
        merge=merge,
        grid_side=side,
        final_norm=norm,
        projector=PoolSpec(
            out_width=config.sub("text_config").size("hidden_size"),
            norm=NormSpec(eps=norm.eps, offset=1.0),
        ),
    )


def _merge(config: Config, side: int) -> int:
    """The side of the square of patches that are averaged to one row."""
    num_rows = config.size("mm_tokens_per_image")
    per_side = isqrt(max(num_rows, 0))
    if per_side == 0 or per_side**2 != num_rows or side % per_side:
        raise ConfigError(
            f"{config.where}: mm_tokens_per_image is {num_rows}; it must be a square whose side divides the {side} "
            f"patches of a side (image_size over patch_size)"
        )
    return side // per_side


def _windows(config: Config) -> list[int | None]:
    """Without layer_types, every n-th layer is global."""
    every = config.size("sliding_window_pattern", 6)
    slides = [bool((i + 1) % every) for i in range(config.depth("num_hidden_layers"))]
    return spread_window(config, config.maybe("sliding_window", int), slides)


def _ropes(config: Config) -> tuple[Rope, Rope]:
    """The rotaries of sliding and of global layers; rope_scaling applies only to the global ones."""
    given = Config(config.get("rope_parameters", {}), f"{config.where}: rope_parameters")
    if set(given.values) - {"sliding_attention", "full_attention"}:
        raise ConfigError(
            f"{config.where}: rope_parameters names {', '.join(given.values)}; the keys allowed for Gemma-3 are "
            f"sliding_attention and full_attention, which have different rotaries"
        )
    scaling: dict[str, Any] = config.get("rope_scaling", {})
    # transformers 4 read the kind under its old name, too; transformers 5 overlooks it here.
    kind = {"rope_type": scaling["type"]} if "type" in scaling else {}
    scaled = _rope_of(given, "full_attention") | kind | scaling
    local = Config({"rope_parameters": _rope_of(given, "sliding_attention")}, config.where)
    whole = Config({"rope_parameters": scaled}, config.where)
    return (
        Rope.read(local, default_base=config.get("rope_local_base_freq", 10_000.0)),
        Rope.read(whole, default_base=config.get("rope_theta", 1_000_000.0)),
    )


def _rope_of(given: Config, kind: str) -> dict[str, Any]:
    plain: dict[str, Any] = {"rope_type": "default"}
    return given.get(kind, plain)


_BLOCK, _OURS = "vision.encoder.layers.{n}", "tower.blocks.{n}"

VISION_PREFIXES = (
    ("model.vision_tower.vision_model.", "vision."),
    ("vision_tower.vision_model.", "vision."),
    ("model.vision_tower.", "vision."),
    ("vision_tower.", "vision."),
    ("model.multi_modal_projector.", "projector."),
    ("multi_modal_projector.", "projector."),
)

VISION_RULES = (
    one("vision.embeddings.patch_embedding.bias", "tower.patches.bias"),
    Rule("vision.embeddings.patch_embedding.weight", ("tower.patches.weight",), flatten=True),
    one("vision.embeddings.position_embedding.weight", "tower.grid.weight"),
    one(_BLOCK + ".layer_norm1.{w}", _OURS + ".attention_norm.{w}"),
    one(_BLOCK + ".layer_norm2.{w}", _OURS + ".mlp_norm.{w}"),
    one(_BLOCK + ".self_attn.out_proj.{w}", _OURS + ".attention.out.{w}"),
    one(_BLOCK + ".self_attn.{p}_proj.{w}", _OURS + ".attention.qkv.{p}.{w}"),
    one(_BLOCK + ".mlp.fc1.{w}", _OURS + ".mlp.up.{w}"),
    one(_BLOCK + ".mlp.fc2.{w}", _OURS + ".mlp.down.{w}"),
    one("vision.post_layernorm.{w}", "tower.norm.{w}"),
    one("projector.mm_soft_emb_norm.{w}", "tower.projector.norm.{w}"),
    Rule("projector.mm_input_projection_weight", ("tower.projector.project.weight",), transpose="always"),
)

MEDIA = MediaDefaults(
    image=ImageSettings(
        patch=14, temporal_patch=1, merge=1, mean=HALF, std=HALF, resample="bilinear", fixed_size=(224, 224)
    ),
    placeholders=Placeholders(
        image_marker="<start_of_image>",
        image_text="\n\n<start_of_image><image_soft_token><end_of_image>\n\n",
        is_bidirectional=True,
    ),
)

FAMILY = Family(
    architecture="Gemma3ForConditionalGeneration",
    model_type="gemma3",
    defaults=Defaults(
        text=TEXT,
        vision=SIGLIP,
        top={"mm_tokens_per_image": 256, "image_token_index": 262_144, "tie_word_embeddings": True},
        aliases={"image_token_id": "image_token_index"},
    ),
    decoder=read_multimodal,
    vision=read_vision,
    media=MEDIA,
    renames=Renames(
        VISION_PREFIXES + TEXT_PREFIXES,
        DECODER_RULES + POST_NORM_RULES + VISION_RULES,
        # The attention pooling head of SigLIP, which the projector replaces.
        ignored=(*IGNORED, r".*\.rotary_emb\..*", r"(model\.)?vision_tower\.(vision_model\.)?head\..*"),
    ),
)

TEXT_FAMILY = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    defaults=Defaults(text=TEXT),
    decoder=read_text,
    renames=Renames(TEXT_PREFIXES, DECODER_RULES + POST_NORM_RULES, ignored=(*IGNORED, r".*\.rotary_emb\..*")),
)

"""Gemma-3, text and multimodal.

Sliding-window and global layers, each kind with its own rotary; norms multiply by 1 + weight and stand on both sides
of attention and MLP; embeddings are scaled; the rows of an image see the whole image. The tower is SigLIP at a fixed
resolution, whose patches are averaged to a few rows per image.
"""

from dataclasses import replace

from saccade.models.config import Config, Rope, read_decoder, read_windows
from saccade.models.family import Family
from saccade.models.rename import DECODER_RULES, POST_NORM_RULES, TEXT_PREFIXES, Renames, Rule, one
from saccade.models.spec import (
    DecoderSpec,
    LayerSpec,
    MediaSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    PoolSpec,
    VisionBlockSpec,
    VisionSpec,
)

# What configs of the hub leave to the defaults of the architecture.
DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_act": "gelu_pytorch_tanh",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
    "sliding_window_pattern": 6,
}


def read_spec(config: Config, architecture: str) -> ModelSpec:
    is_multimodal = config.has("vision_config")
    text = config.sub("text_config") if is_multimodal else config
    given = {key: value for key, value in text.values.items() if value is not None}
    text = Config(DEFAULTS | {"hidden_act": text.get("hidden_activation", "gelu_pytorch_tanh")} | given, text.where)
    return ModelSpec(
        architecture=architecture,
        max_position=text.need("max_position_embeddings", int),
        decoder=read_text(text),
        vision=read_vision(config) if is_multimodal else None,
        media=_read_media(config) if is_multimodal else None,
    )


def read_text(config: Config) -> DecoderSpec:
    plain = read_decoder(config, rope=Rope(1.0, None, (), False))
    norm = replace(plain.norm, offset=1.0)
    attention = replace(
        plain.attention,
        scale=config.need("query_pre_attn_scalar", float) ** -0.5,
        norm=norm,
        softcap=config.maybe("attn_logit_softcapping", float),
    )
    windows, mlp = _windows(config), plain.layers[0].mlp
    local, whole = _ropes(config)
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
    width, patch = vision.need("hidden_size", int), vision.need("patch_size", int)
    side = vision.need("image_size", int) // patch
    merge = side // int(config.get("mm_tokens_per_image", 256) ** 0.5)
    norm = NormSpec(kind="layer", eps=vision.get("layer_norm_eps", 1e-6))
    mlp = MLPSpec(
        width=vision.need("intermediate_size", int),
        activation=Config({"hidden_act": "gelu_pytorch_tanh"} | dict(vision.values)).activation("hidden_act"),
        gated=False,
        bias=True,
    )
    num_heads = vision.need("num_attention_heads", int)
    return VisionSpec(
        block=VisionBlockSpec(width=width, num_heads=num_heads, norm=norm, mlp=mlp),
        depth=vision.need("num_hidden_layers", int),
        patch=patch,
        channels=vision.get("num_channels", 3),
        merge=merge,
        grid_side=side,
        final_norm=norm,
        projector=PoolSpec(
            unit=merge * merge,
            out_width=config.sub("text_config").need("hidden_size", int),
            norm=NormSpec(eps=norm.eps, offset=1.0),
        ),
    )


def _read_media(config: Config) -> MediaSpec:
    return MediaSpec(
        image_token_id=config.get("image_token_index", config.get("image_token_id", 262_144)),
        start_token_id=config.get("boi_token_index", config.get("boi_token_id", 255_999)),
        end_token_id=config.get("eoi_token_index", config.get("eoi_token_id", 256_000)),
        sees_whole_image=True,
    )


def _windows(config: Config) -> list[int | None]:
    """Where layer_types is not written down, every n-th layer is global."""
    if config.has("layer_types"):
        return read_windows(config)
    window, every = config.need("sliding_window", int), config.need("sliding_window_pattern", int)
    return [window if (i + 1) % every else None for i in range(config.need("num_hidden_layers", int))]


def _ropes(config: Config) -> tuple[Rope, Rope]:
    """The rotary of sliding layers and that of global ones."""
    if config.has("rope_parameters") and config.sub("rope_parameters").has("full_attention"):
        rope = config.sub("rope_parameters")
        local = Rope.read(Config({"rope_parameters": rope.values["sliding_attention"]}, rope.where))
        whole = Config({"rope_parameters": rope.values["full_attention"]}, rope.where)
        return local, Rope.read(whole, default_base=1_000_000.0)
    local = Rope(config.get("rope_local_base_freq", 10_000.0), None, (), False)
    return local, Rope.read(config, default_base=1_000_000.0)


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

FAMILY = Family(
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    spec=read_spec,
    renames=Renames(
        VISION_PREFIXES + TEXT_PREFIXES,
        DECODER_RULES + POST_NORM_RULES + VISION_RULES,
        # The attention pooling head of SigLIP, which the projector replaces.
        ignored=(r".*\.rotary_emb\..*", r"(model\.)?vision_tower\.(vision_model\.)?head\..*"),
    ),
)

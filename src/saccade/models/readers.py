"""What families share in reading a config.json: rotary, decoder, windows, experts."""

import math
from dataclasses import dataclass, replace

from saccade.errors import ConfigError
from saccade.layers.layer_spec import (
    AttentionSpec,
    LinearScaling,
    Llama3Scaling,
    MLPSpec,
    MoESpec,
    NormSpec,
    RotarySpec,
    Scaling,
    YarnScaling,
    plain_axes,
)
from saccade.models.model_config import MAX_SIZE, Config, shown
from saccade.models.model_spec import DecoderSpec, LayerSpec

_YARN_KEYS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary of a config, in the old form (rope_theta, rope_scaling) or the new one (rope_parameters). If there is
    a rope_scaling, rope_parameters is ignored. Missing values come from the top level of the config."""

    base: float
    scaling: Scaling | None
    sections: tuple[int, ...]

    @classmethod
    def read(cls, config: Config, *, default_base: float = 10000.0) -> "Rope":
        key = "rope_scaling" if config.get("rope_scaling", {}) else "rope_parameters"
        rope = Config(config.get(key, {}), f"{config.where}: {key}")
        nested = [name for name, value in rope.values.items() if isinstance(value, dict)]
        if nested:
            raise ConfigError(
                f"{rope.where} has a rotary for each of {', '.join(nested)}; this model has one for all layers"
            )
        base = rope.get("rope_theta", config.get("rope_theta", default_base))
        if base <= 0:
            raise ConfigError(f"{rope.where}: rope_theta is {base}; it must be above 0")
        scaling, part = (
            _scaling(rope, config, base),
            rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)),
        )
        if scaling is not None and part != 1.0:
            raise ConfigError(f"{rope.where}: partial_rotary_factor is {part}; with a scaling only 1 is supported")
        sections = rope.ints("mrope_section")
        if len(sections) not in (0, 3):
            raise ConfigError(f"{rope.where}: mrope_section is {list(sections)}; three counts are needed")
        return cls(base, scaling, sections)

    @property
    def gain(self) -> float:
        """What rotation multiplies a query and a key by."""
        return self.scaling.gain if isinstance(self.scaling, YarnScaling) else 1.0

    def spec(self, width: int, axes: tuple[int, ...] | None = None) -> RotarySpec:
        return RotarySpec(width=width, base=self.base, axes=axes or plain_axes(width), scaling=self.scaling)


def read_decoder(
    config: Config,
    *,
    rope: Rope | None = None,
    axes: tuple[int, ...] | None = None,
    windows: list[int | None] | None = None,
) -> DecoderSpec:
    """A Llama-like pre-norm decoder with one rotary; families change what differs with `replace`. Without `windows` all
    layers have full attention, whatever the config says: not all families support sliding windows."""
    width, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    head_dim = config.get("head_dim", width // num_heads)
    if not 2 <= head_dim <= MAX_SIZE or head_dim % 2:
        raise ConfigError(
            f"{config.where}: head_dim is {head_dim} (by default hidden_size / num_attention_heads); "
            f"it must be even and at least 2"
        )
    rope, has_bias = rope or Rope.read(config), config.get("attention_bias", False)
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads", num_heads),
        head_dim=head_dim,
        scale=head_dim**-0.5 * rope.gain**2,
        qkv_bias=has_bias,
        out_bias=has_bias,
    )
    inner, activation = config.size("intermediate_size"), config.activation("hidden_act")
    mlp = MLPSpec(width=inner, activation=activation, bias=config.get("mlp_bias", False))
    windows = windows or [None] * config.depth("num_hidden_layers")
    return DecoderSpec(
        vocab_size=config.size("vocab_size"),
        width=width,
        attention=attention,
        norm=NormSpec(eps=config.need("rms_norm_eps", float)),
        rotaries=(rope.spec(head_dim, axes),),
        layers=tuple(LayerSpec(mlp=mlp, window=window) for window in windows),
        tied_head=config.get("tie_word_embeddings", False),
    )


def spread_window(config: Config, window: int | None, slides: list[bool]) -> list[int | None]:
    """The window of each layer: `window` where layer_types says sliding, else None. `slides` replaces a missing
    layer_types."""
    if config.has("layer_types"):
        kinds = config.need("layer_types", list)
        if len(kinds) != len(slides) or any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
            raise ConfigError(
                f"{config.where}: layer_types must name full_attention or sliding_attention for each of the "
                f"{len(slides)} layers; it is {shown(kinds)}"
            )
        slides = [kind == "sliding_attention" for kind in kinds]
    if any(slides) and window is None:
        raise ConfigError(
            f"{config.where}: {sum(slides)} of {len(slides)} layers are sliding_attention, but there is no window; "
            f"set sliding_window (and use_sliding_window, where the family has it), or change layer_types"
        )
    return [window if slide else None for slide in slides]


def read_moe(config: Config, decoder: DecoderSpec, *, renormalise: bool) -> DecoderSpec:
    """Experts in every `decoder_sparse_step`-th layer not in `mlp_only_layers`; unchanged if num_experts is 0."""
    if config.size("num_experts", least=0) == 0:
        return decoder
    experts = MoESpec(
        num_experts=config.size("num_experts", least=0),
        top_k=config.size("num_experts_per_tok"),
        width=config.size("moe_intermediate_size"),
        activation=config.activation("hidden_act"),
        renormalise=renormalise,
    )
    every, dense = config.size("decoder_sparse_step", 1), set(config.ints("mlp_only_layers"))
    layers = [
        layer if i in dense or (i + 1) % every else replace(layer, mlp=experts)
        for i, layer in enumerate(decoder.layers)
    ]
    return replace(decoder, layers=tuple(layers))


def with_qk_norm(decoder: DecoderSpec) -> DecoderSpec:
    """Adds the decoder's norm to queries and keys, per head."""
    return replace(decoder, attention=replace(decoder.attention, norm=decoder.norm))


def _scaling(rope: Config, config: Config, base: float) -> Scaling | None:
    kind, length = rope.get("rope_type", rope.get("type", "default")), config.get("max_position_embeddings", 1)
    # "dynamic" changes frequencies only for longer prompts than max_position_embeddings, which are refused.
    if kind in ("default", "mrope", "axial", "dynamic"):
        return None
    if kind == "linear":
        return LinearScaling(factor=rope.positive("factor"))
    if kind == "llama3":
        return Llama3Scaling(
            factor=rope.positive("factor"),
            low_freq_factor=rope.positive("low_freq_factor"),
            high_freq_factor=rope.positive("high_freq_factor"),
            original_max_position=rope.size("original_max_position_embeddings", length),
        )
    if kind == "yarn":
        return _yarn(rope, length, base)
    raise ConfigError(f"{rope.where}: rope_type is {kind!r}; allowed: default, dynamic, mrope, linear, llama3, yarn")


def _yarn(rope: Config, length: int, base: float) -> YarnScaling:
    """As in transformers, a null or a zero counts as absent."""
    factor = rope.positive("factor")
    if factor < 1 or base <= 1:
        raise ConfigError(f"{rope.where}: yarn needs a factor of at least 1 and a rope_theta above 1")
    given = {key: rope.positive(key) if rope.get(key, 0.0) else None for key in _YARN_KEYS}
    mscale, mscale_all = given["mscale"], given["mscale_all_dim"]
    over, under = (mscale, mscale_all) if mscale and mscale_all else (1.0, 0.0)
    return YarnScaling(
        factor=factor,
        original_max_position=rope.size("original_max_position_embeddings", length),
        fast_turns=given["beta_fast"] or 32.0,
        slow_turns=given["beta_slow"] or 1.0,
        is_truncated=rope.get("truncate", True),
        gain=given["attention_factor"] or (0.1 * over * math.log(factor) + 1) / (0.1 * under * math.log(factor) + 1),
    )

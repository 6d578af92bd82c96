"""Finds the family for the architecture named in a config.json."""

from collections.abc import Iterator, Mapping
from typing import Any

from saccade.errors import ConfigError
from saccade.layers.layer_spec import Llama3Scaling, MoESpec
from saccade.models.families import gemma3, llama, mistral, qwen2, qwen2_5_vl, qwen2_vl, qwen3, qwen3_vl
from saccade.models.family import Family
from saccade.models.model_config import Config
from saccade.models.model_spec import DecoderSpec, ModelSpec

FAMILIES = (
    qwen3_vl.FAMILY,
    qwen3_vl.MOE_FAMILY,
    qwen2_5_vl.FAMILY,
    qwen2_vl.FAMILY,
    gemma3.FAMILY,
    gemma3.TEXT_FAMILY,
    qwen3.FAMILY,
    qwen3.MOE_FAMILY,
    qwen2.FAMILY,
    llama.FAMILY,
    mistral.FAMILY,
)

ARCHITECTURES = {family.architecture: family for family in FAMILIES}
MODEL_TYPES = {family.model_type: family for family in FAMILIES}
_NO_NAMES: list[Any] = []


def find_family(config: Mapping[str, Any]) -> Family | None:
    """The family whose model is built from a config.json, also if it has no `model_type`."""
    named = config.get("architectures")
    words = [*(named if isinstance(named, list) else ()), config.get("model_type")]
    known = (ARCHITECTURES | MODEL_TYPES).get
    return next((family for word in words if (family := known(str(word))) is not None), None)


def read_spec(config: Config) -> tuple[Family, ModelSpec]:
    named = [str(name) for name in config.get("architectures", _NO_NAMES)]
    known = [ARCHITECTURES[name] for name in named if name in ARCHITECTURES]
    if not named and (kind := config.get("model_type", "")) in MODEL_TYPES:
        known = [MODEL_TYPES[kind]]
    if not known:
        remote = " It asks for its own code (auto_map): remote code is never run." if config.has("auto_map") else ""
        raise ConfigError(
            f"{config.where}: architecture {', '.join(named) or 'none'} is not known.{remote} "
            f"Supported: {', '.join(sorted(ARCHITECTURES))}"
        )
    family = known[0]
    spec = family.spec(config)
    faults = [*_rotary_faults(spec.decoder), *_decoder_faults(spec.decoder), *_vision_faults(spec)]
    if faults:
        raise ConfigError(f"{config.where}: {'; '.join(faults)}; use the config.json that belongs to these weights")
    return family, spec


def _rotary_faults(spec: DecoderSpec) -> Iterator[str]:
    for rotary in spec.rotaries:
        scaling = rotary.scaling
        if 2 * len(rotary.axes) != rotary.width:
            yield (
                f"mrope_section adds up to {len(rotary.axes)}; it must be {rotary.width // 2}, half of head_dim "
                f"(by default it is that of the family's models)"
            )
        if isinstance(scaling, Llama3Scaling) and scaling.low_freq_factor >= scaling.high_freq_factor:
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            yield f"low_freq_factor is {low}; it must be below high_freq_factor, which is {high}"


def _decoder_faults(spec: DecoderSpec) -> Iterator[str]:
    heads, kv_heads = spec.attention.num_heads, spec.attention.num_kv_heads
    if kv_heads < 1 or heads % kv_heads:
        yield f"num_key_value_heads is {kv_heads}; it must divide num_attention_heads, which is {heads}"
    if spec.norm.eps < 0:
        yield f"rms_norm_eps is {spec.norm.eps}; it must not be below 0"
    if spec.logit_softcap is not None and spec.logit_softcap <= 0:
        yield f"final_logit_softcapping is {spec.logit_softcap}; it must be above 0, or null for none"
    if any(layer.window is not None and layer.window < 1 for layer in spec.layers):
        yield "sliding_window is below 1; a token must at least attend to itself"
    for moe in {layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoESpec)}:
        if not 1 <= moe.top_k <= moe.num_experts:
            yield f"num_experts_per_tok is {moe.top_k}; 1 to {moe.num_experts} (num_experts) are allowed"
    if spec.deepstack_levels >= len(spec.layers):
        yield (
            f"{spec.deepstack_levels} deepstack_visual_indexes go between {len(spec.layers)} layers; "
            f"at most {len(spec.layers) - 1} are allowed"
        )


def _vision_faults(spec: ModelSpec) -> Iterator[str]:
    vision, width = spec.vision, spec.decoder.width
    if vision is None:
        return
    if vision.projector.out_width != width:
        yield (
            f"vision_config describes rows of {vision.projector.out_width} columns; "
            f"it must be hidden_size of the text, which is {width}"
        )
    heads, num_columns = vision.block.num_heads, vision.block.width // vision.block.num_heads
    if vision.block.width % heads:
        yield f"{heads} heads of the tower do not divide its width of {vision.block.width}"
    elif vision.rotary_base and num_columns % 4:
        yield f"heads of the tower have {num_columns} columns; a rotary by row and column needs a multiple of 4"
    levels = vision.deepstack_layers
    if len(set(levels)) != len(levels) or not set(levels) <= set(range(vision.depth)):
        yield f"deepstack_visual_indexes is {list(levels)}; different layers from 0 to {vision.depth - 1} are allowed"

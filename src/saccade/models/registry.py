"""From the architecture a config.json names to the family that knows it."""

from saccade.errors import ConfigError
from saccade.models.config import Config
from saccade.models.families import gemma3, llama, qwen2, qwen2_5_vl, qwen3, qwen3_vl
from saccade.models.family import Family
from saccade.models.spec import ModelSpec

FAMILIES = (
    qwen3_vl.FAMILY,
    qwen2_5_vl.FAMILY,
    gemma3.FAMILY,
    qwen3.FAMILY,
    qwen2.FAMILY,
    llama.FAMILY,
)

ARCHITECTURES = {name: family for family in FAMILIES for name in family.architectures}


def read_spec(config: Config) -> tuple[Family, ModelSpec]:
    """The family of a config.json, and the model it describes."""
    named = [str(name) for name in config.need("architectures", list)]
    known = [name for name in named if name in ARCHITECTURES]
    if not known:
        remote = " It asks for its own code (auto_map): remote code is never run." if config.has("auto_map") else ""
        raise ConfigError(
            f"{config.where}: architecture {', '.join(named) or 'none'} is not known.{remote} "
            f"Supported: {', '.join(sorted(ARCHITECTURES))}"
        )
    if config.has("quantization_config"):
        method = config.sub("quantization_config").get("quant_method", "unknown")
        raise ConfigError(
            f"{config.where}: the weights are quantised ({method}), which is not supported; "
            f"use the checkpoint with bfloat16 weights"
        )
    family = ARCHITECTURES[known[0]]
    return family, family.spec(config, known[0])

"""Qwen3, dense and mixture of experts: Llama with norms on queries and keys."""

from saccade.models.config import MAX_LAYERS, Config, read_decoder, read_moe, read_windows, with_qk_norm
from saccade.models.defaults import QWEN3, QWEN3_MOE
from saccade.models.family import Family
from saccade.models.rename import (
    DECODER_RULES,
    EXPERT_RULES,
    FUSED_EXPERT_RULES,
    PRE_NORM_RULES,
    ROUTER_RULES,
    TEXT_PREFIXES,
    Renames,
)
from saccade.models.spec import ModelSpec


def read_spec(config: Config, architecture: str) -> ModelSpec:
    return ModelSpec(
        architecture=architecture,
        max_position=config.size("max_position_embeddings"),
        decoder=with_qk_norm(read_decoder(config, windows=read_windows(config))),
    )


def read_moe_spec(config: Config, architecture: str) -> ModelSpec:
    """The window of a model with experts is that of all its layers; max_window_layers and layer_types say nothing."""
    window = config.maybe("sliding_window", int) if config.get("use_sliding_window", False) else None
    windows = [window] * config.size("num_hidden_layers", most=MAX_LAYERS)
    decoder = with_qk_norm(read_decoder(config, windows=windows))
    return ModelSpec(
        architecture=architecture,
        max_position=config.size("max_position_embeddings"),
        decoder=read_moe(config, decoder, renormalise=config.get("norm_topk_prob", False)),
    )


FAMILY = Family(
    architectures=("Qwen3ForCausalLM",),
    model_type="qwen3",
    defaults=QWEN3,
    spec=read_spec,
    renames=Renames(TEXT_PREFIXES, DECODER_RULES + PRE_NORM_RULES),
)

MOE_FAMILY = Family(
    architectures=("Qwen3MoeForCausalLM",),
    model_type="qwen3_moe",
    defaults=QWEN3_MOE,
    spec=read_moe_spec,
    renames=Renames(
        TEXT_PREFIXES,
        DECODER_RULES + PRE_NORM_RULES + ROUTER_RULES + EXPERT_RULES + FUSED_EXPERT_RULES,
    ),
)

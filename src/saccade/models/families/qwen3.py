"""Qwen3, dense and mixture of experts: Llama with norms on queries and keys."""

from saccade.models.config import Config, num_experts, read_decoder, read_moe, with_qk_norm
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
    decoder = with_qk_norm(read_decoder(config))
    if num_experts(config):
        decoder = read_moe(config, decoder, renormalise=config.get("norm_topk_prob", False))
    return ModelSpec(
        architecture=architecture,
        max_position=config.need("max_position_embeddings", int),
        decoder=decoder,
    )


FAMILY = Family(
    architectures=("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
    spec=read_spec,
    renames=Renames(
        TEXT_PREFIXES,
        DECODER_RULES + PRE_NORM_RULES + ROUTER_RULES + EXPERT_RULES + FUSED_EXPERT_RULES,
    ),
)

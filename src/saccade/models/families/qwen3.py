"""Qwen3, dense and mixture of experts: Llama with norms on queries and keys."""

from saccade.models.families import llama, qwen2
from saccade.models.family import Defaults, Family
from saccade.models.model_config import Config
from saccade.models.model_spec import DecoderSpec
from saccade.models.readers import read_decoder, read_moe, with_qk_norm
from saccade.models.rename import EXPERT_RULES, FUSED_EXPERT_RULES, ROUTER_RULES

MOE_TEXT = qwen2.TEXT | {"hidden_size": 2048, "num_hidden_layers": 24, "decoder_sparse_step": 1}
MOE_ALIASES = {"num_local_experts": "num_experts"}


def read_qwen3(config: Config) -> DecoderSpec:
    return with_qk_norm(read_decoder(config, windows=qwen2.read_windows(config)))


def read_qwen3_moe(config: Config) -> DecoderSpec:
    """A model with experts uses its window in all layers; max_window_layers and layer_types are ignored."""
    window = config.maybe("sliding_window", int) if config.get("use_sliding_window", False) else None
    windows = [window] * config.depth("num_hidden_layers")
    decoder = with_qk_norm(read_decoder(config, windows=windows))
    return read_moe(config, decoder, renormalise=config.get("norm_topk_prob", False))


FAMILY = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    defaults=Defaults(text=qwen2.TEXT | qwen2.SLIDING | {"max_window_layers": 28, "head_dim": 128}),
    decoder=read_qwen3,
    renames=llama.RENAMES,
)

MOE_FAMILY = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    defaults=Defaults(
        text=MOE_TEXT
        | qwen2.SLIDING
        | {
            "intermediate_size": 6144,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
        },
        aliases=MOE_ALIASES,
    ),
    decoder=read_qwen3_moe,
    renames=llama.RENAMES.plus(ROUTER_RULES + EXPERT_RULES + FUSED_EXPERT_RULES),
)

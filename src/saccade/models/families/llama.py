"""Llama: Llama-2 and -3, SmolLM2, TinyLlama."""

from saccade.models.family import Defaults, Family
from saccade.models.readers import read_decoder
from saccade.models.rename import DECODER_RULES, PRE_NORM_RULES, TEXT_PREFIXES, Renames

RENAMES = Renames(TEXT_PREFIXES, DECODER_RULES + PRE_NORM_RULES)

FAMILY = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    defaults=Defaults(
        text={
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "intermediate_size": 11_008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
        }
    ),
    decoder=read_decoder,
    renames=RENAMES,
)

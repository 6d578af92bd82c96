"""Mistral: Llama whose layers may have a sliding window."""

from saccade.models.families import llama
from saccade.models.family import Defaults, Family
from saccade.models.model_config import Config
from saccade.models.model_spec import DecoderSpec
from saccade.models.readers import read_decoder, spread_window


def read_mistral(config: Config) -> DecoderSpec:
    window = config.maybe("sliding_window", int)
    slides = [window is not None] * config.depth("num_hidden_layers")
    return read_decoder(config, windows=spread_window(config, window, slides))


FAMILY = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    defaults=Defaults(
        text={
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "hidden_act": "silu",
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
        }
    ),
    decoder=read_mistral,
    renames=llama.RENAMES,
)

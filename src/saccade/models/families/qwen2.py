"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from dataclasses import replace

from saccade.models.families import llama
from saccade.models.family import Defaults, Family
from saccade.models.model_config import Config, read_decoder, read_windows
from saccade.models.model_spec import DecoderSpec

TEXT = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
}
SLIDING = {"use_sliding_window": False, "sliding_window": 4096}


def with_qkv_bias(decoder: DecoderSpec) -> DecoderSpec:
    return replace(decoder, attention=replace(decoder.attention, qkv_bias=True))


def read_qwen2(config: Config) -> DecoderSpec:
    return with_qkv_bias(read_decoder(config, windows=read_windows(config)))


FAMILY = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    defaults=Defaults(text=TEXT | SLIDING | {"max_window_layers": 28}),
    decoder=read_qwen2,
    renames=llama.FAMILY.renames,
)

"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from dataclasses import replace

from saccade.models.families import llama
from saccade.models.family import Defaults, Family
from saccade.models.model_config import Config
from saccade.models.model_spec import DecoderSpec
from saccade.models.readers import read_decoder, spread_window

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


def read_windows(config: Config) -> list[int | None]:
    """The attention window of each layer (None: full attention), from Qwen's keys."""
    depth = config.depth("num_hidden_layers")
    window = config.maybe("sliding_window", int) if config.get("use_sliding_window", False) else None
    first = depth if window is None else config.get("max_window_layers", depth)
    return spread_window(config, window, [i >= first for i in range(depth)])


def read_qwen2(config: Config) -> DecoderSpec:
    return with_qkv_bias(read_decoder(config, windows=read_windows(config)))


FAMILY = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    defaults=Defaults(text=TEXT | SLIDING | {"max_window_layers": 28}),
    decoder=read_qwen2,
    renames=llama.RENAMES,
)

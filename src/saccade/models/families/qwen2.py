"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from dataclasses import replace

from saccade.models.config import Config, read_decoder, read_windows
from saccade.models.defaults import QWEN2
from saccade.models.families import llama
from saccade.models.family import Family
from saccade.models.spec import DecoderSpec, ModelSpec


def with_qkv_bias(decoder: DecoderSpec) -> DecoderSpec:
    return replace(decoder, attention=replace(decoder.attention, qkv_bias=True))


def read_spec(config: Config, architecture: str) -> ModelSpec:
    return ModelSpec(
        architecture=architecture,
        max_position=config.size("max_position_embeddings"),
        decoder=with_qkv_bias(read_decoder(config, windows=read_windows(config))),
    )


FAMILY = Family(
    architectures=("Qwen2ForCausalLM",),
    model_type="qwen2",
    defaults=QWEN2,
    spec=read_spec,
    renames=llama.FAMILY.renames,
)

"""Llama: Llama-2 and -3, SmolLM2, TinyLlama."""

from saccade.models.config import Config, read_decoder
from saccade.models.defaults import LLAMA
from saccade.models.family import Family
from saccade.models.rename import DECODER_RULES, PRE_NORM_RULES, TEXT_PREFIXES, Renames
from saccade.models.spec import ModelSpec


def read_spec(config: Config, architecture: str) -> ModelSpec:
    return ModelSpec(
        architecture=architecture,
        max_position=config.size("max_position_embeddings"),
        decoder=read_decoder(config),
    )


FAMILY = Family(
    architectures=("LlamaForCausalLM",),
    model_type="llama",
    defaults=LLAMA,
    spec=read_spec,
    renames=Renames(TEXT_PREFIXES, DECODER_RULES + PRE_NORM_RULES),
)

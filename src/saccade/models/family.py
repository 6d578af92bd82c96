"""What declares a model family: how its config.json is recognised, completed and read, its tensor names, and its image
handling. Does not import torch, because the front end uses it too."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from saccade.layers.layer_spec import YarnScaling
from saccade.models.media import MediaDefaults
from saccade.models.model_config import Config
from saccade.models.model_spec import DecoderSpec, ModelSpec, VisionSpec
from saccade.models.rename import Renames

Table = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """The defaults of transformers for keys missing in a config.json, for the model and its input processors. `text`
    applies to the top level if there is no text_config; `aliases` maps other names of a key to the one that is read."""

    text: Table
    vision: Table = field(default_factory=dict)
    top: Table = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)

    def complete(self, config: Table) -> dict[str, Any]:
        """The config with missing keys filled in. An explicit null is kept: it means none."""
        whole = dict(self.top) | self._renamed(config)
        if not isinstance(whole.get("text_config"), dict):
            whole = dict(self.text) | whole
        for key, table in (("text_config", self.text), ("vision_config", self.vision)):
            if isinstance(whole.get(key), dict):
                whole[key] = dict(table) | self._renamed(whole[key])
        return whole

    def _renamed(self, given: Table) -> dict[str, Any]:
        others = {self.aliases[key]: value for key, value in given.items() if key in self.aliases}
        return others | {key: value for key, value in given.items() if key not in self.aliases}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`decoder` and `vision` read a completed config.json. Text models have neither `vision` nor `media`."""

    architecture: str
    model_type: str
    defaults: Defaults
    decoder: Callable[[Config], DecoderSpec]
    vision: Callable[[Config], VisionSpec] | None = None
    renames: Renames
    media: MediaDefaults | None = None

    def __post_init__(self) -> None:
        assert (self.vision is None) == (self.media is None), f"{self.architecture} has only one of vision and media"

    def spec(self, config: Config) -> ModelSpec:
        config = Config(self.defaults.complete(config.values), config.where)
        decoder = self.decoder(config)
        # Instructions for long texts, such as Qwen3's, only add a rope_scaling; max_position_embeddings stays.
        scalings = [rotary.scaling for rotary in decoder.rotaries]
        longest = [scaling.max_position for scaling in scalings if isinstance(scaling, YarnScaling)]
        return ModelSpec(
            architecture=self.architecture,
            decoder=decoder,
            max_position=max([config.text.size("max_position_embeddings"), *longest]),
            vision=self.vision(config) if self.vision else None,
            sees_whole_image=self.media is not None and self.media.placeholders.is_bidirectional,
        )

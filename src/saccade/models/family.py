"""A model family is a declaration: what its config.json is recognised by, what it may leave out and how it reads, what
its tensors are called, and what it does with images. Nothing here needs torch: the front end reads it, too."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from saccade.models.config import Config
from saccade.models.media import MediaDefaults
from saccade.models.rename import Renames
from saccade.models.spec import DecoderSpec, ModelSpec, VisionSpec

Table = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What transformers fills in where a config.json leaves a key out, for the model and for what prepares its inputs.

    `text` stands at the top of a text model's config, and of one that is written flat; `aliases` maps other names of a
    key to the name that is read.
    """

    text: Table
    vision: Table = field(default_factory=dict)
    top: Table = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)

    def complete(self, config: Table) -> dict[str, Any]:
        """A config with everything it leaves out. An explicit null stays: it says that there is none."""
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
    """`decoder` and `vision` read a whole config.json in which nothing is left out. Text models have no `vision` and no
    `media`."""

    architecture: str
    model_type: str
    defaults: Defaults
    decoder: Callable[[Config], DecoderSpec]
    vision: Callable[[Config], VisionSpec] | None = None
    renames: Renames
    media: MediaDefaults | None = None

    def spec(self, config: Config) -> ModelSpec:
        """The model that a config.json describes."""
        config = Config(self.defaults.complete(config.values), config.where)
        return ModelSpec(
            architecture=self.architecture,
            decoder=self.decoder(config),
            max_position=config.text.size("max_position_embeddings"),
            vision=self.vision(config) if self.vision else None,
            sees_whole_image=self.media is not None and self.media.placeholders.is_bidirectional,
        )

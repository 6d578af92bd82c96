"""A model family is a declaration: its architectures, how its config reads, what its tensors are called, and what it
does with images. Nothing here needs torch: the front end reads it, too."""

from collections.abc import Callable
from dataclasses import dataclass

from saccade.models.config import Config
from saccade.models.defaults import Defaults
from saccade.models.media import MediaDefaults
from saccade.models.rename import Renames
from saccade.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Both `architectures` and `model_type` are what a config.json is recognised by. Text models have no `media`."""

    architectures: tuple[str, ...]
    model_type: str
    defaults: Defaults
    spec: Callable[[Config, str], ModelSpec]
    renames: Renames
    media: MediaDefaults | None = None

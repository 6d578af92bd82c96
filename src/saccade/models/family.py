"""A model family is a declaration: its architectures, how its config reads, what its tensors are called."""

from collections.abc import Callable
from dataclasses import dataclass

from saccade.models.config import Config
from saccade.models.defaults import Defaults
from saccade.models.rename import Renames
from saccade.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    architectures: tuple[str, ...]
    defaults: Defaults
    spec: Callable[[Config, str], ModelSpec]
    renames: Renames

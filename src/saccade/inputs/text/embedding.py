"""How a checkpoint turns hidden states into embeddings, and the final steps before a caller gets one."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from saccade.errors import ConfigError, RequestError
from saccade.inputs.checkpoint_files import read_optional_json, read_text

POOLINGS = ("last", "mean")
_MODES = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}
_MODULES = ("Transformer", "Pooling", "Normalize")  # the sentence-transformers modules supported here


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingSettings:
    """`width` is the size of a hidden state, or None if config.json does not have it."""

    pooling: str = "last"
    width: int | None = None

    @classmethod
    def from_folder(cls, folder: Path, pooling: str = "auto") -> "EmbeddingSettings":
        """`pooling` is the value of the flag; "auto" reads the sentence-transformers files, if there are any."""
        config = read_optional_json(folder / "config.json")
        text = config.get("text_config")
        width = (text if isinstance(text, dict) else config).get("hidden_size")
        found = _stored_pooling(folder) if pooling == "auto" else pooling
        return cls(pooling=found, width=width if type(width) is int else None)

    def choose_pooling(self, asked: str | None) -> str:
        if asked is not None and asked not in POOLINGS:
            message = f"pooling is {asked}; allowed are {', '.join(POOLINGS)}"
            raise RequestError(message, param="pooling", code="invalid_value")
        return asked or self.pooling

    def check_dimensions(self, dimensions: int | None, width: int | None = None) -> None:
        """Any model's vectors can be cut; whether they stay useful depends on how it was trained."""
        most = width or self.width
        if dimensions is not None and (dimensions < 1 or (most is not None and dimensions > most)):
            allowed = f"allowed are 1 to {most}" if most is not None else "at least 1 is needed"
            message = f"dimensions is {dimensions}; {allowed}, the size of this model's embeddings"
            raise RequestError(message, param="dimensions", code="invalid_value")

    def finish(
        self, vector: NDArray[Any], *, dimensions: int | None = None, normalize: bool = True
    ) -> NDArray[np.float32]:
        """Cuts the vector, then normalizes it to length 1. A zero vector stays zero."""
        self.check_dimensions(dimensions, len(vector))
        found = vector[:dimensions].astype(np.float64)
        norm = float(np.linalg.norm(found)) if normalize else 1.0
        scaled: NDArray[np.float32] = (found / (norm or 1.0)).astype(np.float32)
        return scaled


def _stored_pooling(folder: Path) -> str:
    modules = _read_modules(folder / "modules.json")
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if unknown := [kind for kind in kinds if kind not in _MODULES]:
        problem = f"{folder / 'modules.json'} has a module {unknown[0]!r:.60}, which is not supported"
        raise ConfigError(f"{problem}; choose how hidden states become embeddings (--pooling last or mean)")
    paths = [module.get("path") for module, kind in zip(modules, kinds, strict=True) if kind == "Pooling"]
    name = paths[0] if paths and isinstance(paths[0], str) and Path(paths[0]).name == paths[0] else "1_Pooling"
    config = read_optional_json(folder / name / "config.json")
    wanted = [mode for mode, is_on in config.items() if mode.startswith("pooling_mode_") and is_on is True]
    if not wanted:
        return "last"
    if len(wanted) > 1 or wanted[0] not in _MODES:
        problem = f"{folder / name / 'config.json'} asks for {', '.join(wanted)[:200]}, which is not supported"
        raise ConfigError(f"{problem}; choose another pooling (--pooling last or mean)")
    return _MODES[wanted[0]]


def _read_modules(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError):
        raise ConfigError(f"{path} is not valid JSON; download the checkpoint again") from None
    if not isinstance(value, list) or not all(isinstance(module, dict) for module in value):
        raise ConfigError(f"{path} must be a list of objects; download the checkpoint again")
    return value

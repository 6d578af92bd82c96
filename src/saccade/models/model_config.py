"""Typed access to a checkpoint's config.json, with errors that name the file."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from saccade.errors import ConfigError

T = TypeVar("T", int, float, bool, str, list[Any], dict[str, Any])

MAX_SIZE = 2**24  # of a dimension: far above any model, but small enough that a typo does not exhaust memory
MAX_LAYERS = 4096
MAX_WHOLE_FLOAT = 2**53
MAX_SHOWN = 200
MODELOPT = "hf_quant_config.json"  # older exports of NVIDIA ModelOpt describe their format in this file alone
ADAPTER = "adapter_config.json"  # of PEFT
MERGE_ADAPTER = "it is a LoRA adapter, so merge it into its base model first (merge_and_unload of PEFT)"
_KINDS: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "an object",
}
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}


@dataclass(frozen=True, slots=True)
class Config:
    """A JSON object in a config.json. A null value counts as absent, as in Hugging Face configs."""

    values: Mapping[str, Any]
    where: str = "config.json"

    @classmethod
    def read(cls, path: Path) -> "Config":
        values = _read_object(path)
        if values.get("quantization_config") is None and (beside := path.with_name(MODELOPT)).is_file():
            values["quantization_config"] = {"quant_method": "modelopt"} | _read_object(beside)
        return cls(values, str(path))

    def maybe(self, key: str, kind: type[T]) -> T | None:
        value = self.values.get(key)
        if value is None:
            return None
        if kind is float and type(value) is int and abs(value) <= MAX_WHOLE_FLOAT:
            return float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{self.where}: {key} is {shown(value)}; {_KINDS[kind]} is needed")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{self.where}: {key} is {value}; a finite number is needed")
        return value

    def get(self, key: str, default: T) -> T:
        value = self.maybe(key, type(default))
        return default if value is None else value

    def need(self, key: str, kind: type[T]) -> T:
        value = self.maybe(key, kind)
        if value is None:
            raise ConfigError(f"{self.where}: {key} is missing; the model cannot be built without it")
        return value

    def size(self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_SIZE) -> int:
        """A count between `least` and `most`."""
        value = self.need(key, int) if default is None else self.get(key, default)
        if not least <= value <= most:
            raise ConfigError(f"{self.where}: {key} is {value}; allowed are {least} to {most}")
        return value

    def depth(self, key: str) -> int:
        """A number of layers."""
        return self.size(key, most=MAX_LAYERS)

    def positive(self, key: str) -> float:
        value = self.need(key, float)
        if value <= 0:
            raise ConfigError(f"{self.where}: {key} is {value}; it must be above 0")
        return value

    def ints(self, key: str) -> tuple[int, ...]:
        values = self.get(key, [])
        if not all(type(value) is int and 0 <= value <= MAX_SIZE for value in values):
            raise ConfigError(f"{self.where}: {key} is {shown(values)}; it must be a list of integers of at least 0")
        return tuple(values)

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def sub(self, key: str) -> "Config":
        return Config(self.need(key, dict), f"{self.where}: {key}")

    @property
    def text(self) -> "Config":
        """The decoder's object; the config itself if it is flat."""
        return self.sub("text_config") if self.has("text_config") else self

    def activation(self, key: str) -> str:
        name = self.need(key, str)
        if name not in ACTIVATIONS:
            raise ConfigError(f"{self.where}: {key} is {name!r}; allowed: {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]


def _read_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        adapter = f"; {MERGE_ADAPTER}" if (path.parent / ADAPTER).is_file() else ""
        raise ConfigError(f"{path.parent} has no {path.name}, so it is not a checkpoint{adapter}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}; a JSON object is needed")
    return values


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."

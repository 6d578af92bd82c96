"""A checkpoint's sampling defaults and end tokens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.errors import ConfigError
from saccade.inputs.checkpoint_files import read_json, read_optional_json
from saccade.inputs.text.tokenizer import Tokenizer

MAX_NUMBER = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Sampling values of generation_config.json, None if absent; `do_sample: false` means temperature 0.
    `eos_token_ids` come from it, from config.json and from the tokenizer: tools that train a base model to chat often
    change the tokenizer alone, and its answers would run to the length limit."""

    eos_token_ids: frozenset[int]
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @classmethod
    def from_folder(cls, folder: Path, tokenizer: Tokenizer | None = None) -> "GenerationDefaults":
        raw = read_optional_json(folder / "generation_config.json")
        greedy = {"temperature": 0.0} if raw.get("do_sample") is False else {}
        values = {name: _number(raw, name, folder) for name in _FLOATS}
        top_k = _number(raw, "top_k", folder)
        return cls(
            eos_token_ids=config_eos_ids(folder) | (frozenset() if tokenizer is None else tokenizer.eos_ids),
            **(values | greedy),
            top_k=None if top_k is None else int(top_k),
        )


def config_eos_ids(folder: Path) -> frozenset[int]:
    config = read_json(folder / "config.json")
    raw = read_optional_json(folder / "generation_config.json")
    parts = [part for part in (raw, config, config.get("text_config")) if isinstance(part, dict)]
    named = [part.get("eos_token_id") for part in parts]
    return frozenset(token for value in named for token in _token_ids(value, folder))


_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty")


def _token_ids(value: Any, folder: Path) -> list[int]:
    values = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token) is int for token in values):
        raise ConfigError(f"{folder}: eos_token_id must be a whole number or a list of them; got {value!r:.200}")
    return [token for token in values if 0 <= token < MAX_NUMBER]  # negative ids such as -1 mean no token


def _number(raw: dict[str, Any], name: str, folder: Path) -> float | None:
    value = raw.get(name)
    if value is not None and not (type(value) in (int, float) and abs(value) < MAX_NUMBER):
        raise ConfigError(f"{folder / 'generation_config.json'}: {name} must be a number; got {value!r:.200}")
    return value

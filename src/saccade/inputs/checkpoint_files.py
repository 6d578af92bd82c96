"""Reads the small JSON files of a checkpoint folder. Nothing in the folder is ever executed."""

import json
from pathlib import Path
from typing import Any

from saccade.errors import ConfigError

# A larger file is not a settings file; tokenizer.json has its own, larger bound.
MAX_JSON_BYTES = 16 * 2**20


def read_json(path: Path) -> dict[str, Any]:
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(f"{path} is not valid JSON; download the checkpoint again") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}; a JSON object was expected")
    return value


def read_optional_json(path: Path) -> dict[str, Any]:
    """An empty object if the file does not exist."""
    return read_json(path) if path.is_file() else {}


def read_text(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> str:
    if not path.is_file():
        raise ConfigError(f"{path.parent} has no {path.name}; a complete checkpoint folder was expected")
    if (size := path.stat().st_size) > max_bytes:
        raise ConfigError(f"{path} has {size} bytes; at most {max_bytes} are read")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text; download the checkpoint again") from None

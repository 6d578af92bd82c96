"""Parses values of settings from text, the same way for flags, environment variables and files."""

import json
from argparse import ArgumentTypeError
from collections.abc import Callable
from fractions import Fraction
from typing import Any, get_args, get_origin

from saccade.config import Word

_SCALES = {"k": 1000, "m": 1000**2, "g": 1000**3, "K": 1024, "M": 1024**2, "G": 1024**3}
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}

Reader = Callable[[str], Any]


def human_int(text: str) -> int:
    """Parses an integer with an optional suffix: k, m, g for powers of 1000, K, M, G for powers of 1024."""
    number, scale = (text[:-1], _SCALES[text[-1]]) if text[-1:] in _SCALES else (text, 1)
    is_fraction = "." in number and "e" not in number.lower()
    try:
        value = (Fraction(number) if is_fraction else int(number)) * scale  # 2.01k is 2010, but not as a float
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not an integer such as 8192, 8k (8000) or 8K (8192)") from None
    if value != int(value):
        raise ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)


def reader_of(kind: Any) -> Reader:
    if keeps_commas(kind):
        return _read_texts
    if is_list(kind):
        return lambda text: _read_list(text, reader_of(_item_of(kind)))
    known: dict[Any, Reader] = {bool: read_bool, int: human_int, float: _read_float, str: str}
    return known[kind]


def read_value(kind: Any, value: Any) -> Any:
    """Reads a value of a config file. Strings are parsed like flags."""
    if keeps_commas(kind) and isinstance(value, list):
        return tuple(_read_text(item) for item in value)
    if keeps_commas(kind):
        return (_read_text(value),)
    if is_list(kind) and isinstance(value, list):
        return tuple(read_value(_item_of(kind), item) for item in value)
    if kind is str and isinstance(value, dict | list):
        return json.dumps(value)
    if kind is str and isinstance(value, bool):  # YAML reads a bare on or off as a boolean
        return "on" if value else "off"
    if isinstance(value, bool) and kind is not bool:
        raise ArgumentTypeError(f"{value!r} is not a {kind.__name__}")
    if isinstance(value, str | int | float):
        return reader_of(kind)(str(value))
    raise ArgumentTypeError(f"{value!r} is a {type(value).__name__}, which the setting cannot hold")


def is_list(kind: Any) -> bool:
    return get_origin(kind) is tuple


def keeps_commas(kind: Any) -> bool:
    """Whether items are free text, such as keys or file names, where a comma does not separate items."""
    return is_list(kind) and get_args(kind)[0] is str


def read_bool(text: str) -> bool:
    if text.lower() not in _WORDS:
        raise ArgumentTypeError(f"{text!r} is neither true nor false")
    return _WORDS[text.lower()]


def shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _item_of(kind: Any) -> Any:
    """The type of a list's items; a `Word` is a str."""
    item = get_args(kind)[0]
    return str if item == Word else item


def _read_list(text: str, read: Reader) -> tuple[Any, ...]:
    if not text.startswith("["):
        return tuple(read(part) for part in text.split(","))
    try:
        parts = json.loads(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a JSON list") from None
    return tuple(read(str(part)) for part in parts)


def _read_texts(text: str) -> tuple[str, ...]:
    """Takes the text as one item, or as a JSON list of strings, the only way to put several into a variable."""
    try:
        parts = json.loads(text) if text.startswith("[") else None
    except ValueError:
        parts = None
    if isinstance(parts, list) and parts and all(isinstance(part, str) for part in parts):
        return tuple(parts)
    return (text,)


def _read_text(value: Any) -> str:
    """Refuses an item that YAML parsed as another type, because its text (yes, 0123, 1e3) is lost."""
    if not isinstance(value, str):
        raise ArgumentTypeError(f"YAML reads this as {type(value).__name__}, not as text; put it in quotes")
    return value


def _read_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a number") from None

"""Values of settings from text: flags, environment variables and files are read alike."""

import json
from argparse import ArgumentTypeError
from collections.abc import Callable
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

_SCALES = {"k": 1000, "m": 1000**2, "g": 1000**3, "K": 1024, "M": 1024**2, "G": 1024**3}
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}

Reader = Callable[[str], Any]


def human_int(text: str) -> int:
    """An integer, with k, m or g for powers of 1000 and K, M or G for powers of 1024."""
    number, scale = (text[:-1], _SCALES[text[-1]]) if text[-1:] in _SCALES else (text, 1)
    try:
        value = float(number) * scale if "." in number else int(number) * scale
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not an integer such as 8192, 8k (8000) or 8K (8192)") from None
    if value != int(value):
        raise ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)


def reader_of(kind: Any) -> Reader:
    """What turns text into a value of a field's type."""
    kind = _plain(kind)
    origin = get_origin(kind)
    if keeps_commas(kind):
        return _read_texts
    if origin is tuple:
        return lambda text: _read_list(text, reader_of(get_args(kind)[0]))
    if origin is Literal:
        return lambda text: _read_choice(text, {str(value): value for value in get_args(kind)})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return lambda text: _read_choice(text, {str(member.value): member for member in kind})
    known: dict[Any, Reader] = {bool: read_bool, int: human_int, float: _read_float, str: str}
    return known[kind]


def read_value(kind: Any, value: Any) -> Any:
    """A value of a file: text is read as a flag is; numbers, switches and lists are taken as they are."""
    kind = _plain(kind)
    if keeps_commas(kind) and isinstance(value, list):
        return tuple(_read_text(item) for item in value)
    if keeps_commas(kind):
        return (_read_text(value),)
    if is_list(kind) and isinstance(value, list):
        return tuple(read_value(get_args(kind)[0], item) for item in value)
    if kind is str and isinstance(value, dict | list):
        return json.dumps(value)
    if kind is str and isinstance(value, bool):  # a bare word in YAML
        return "on" if value else "off"
    if isinstance(value, bool) and kind is not bool:
        raise ArgumentTypeError(f"{value!r} is not a {kind.__name__}")
    if isinstance(value, str | int | float):
        return reader_of(kind)(str(value))
    raise ArgumentTypeError(f"{value!r} is a {type(value).__name__}, which the setting cannot hold")


def is_list(kind: Any) -> bool:
    return get_origin(kind) is tuple


def keeps_commas(kind: Any) -> bool:
    """Whether a list's items are any text, such as keys or names of files: a comma is then a part of an item."""
    return is_list(kind) and get_args(kind)[0] is str


def read_bool(text: str) -> bool:
    if text.lower() not in _WORDS:
        raise ArgumentTypeError(f"{text!r} is neither true nor false")
    return _WORDS[text.lower()]


def shown(value: Any) -> str:
    """A default as help shows it."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _plain(kind: Any) -> Any:
    """A type without None, and without what is only noted about it."""
    if get_origin(kind) in (Union, UnionType):
        return next(part for part in get_args(kind) if part is not NoneType)
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _read_list(text: str, read: Reader) -> tuple[Any, ...]:
    """Parts between commas, or a JSON list."""
    if not text.startswith("["):
        return tuple(read(part) for part in text.split(","))
    try:
        parts = json.loads(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a JSON list") from None
    return tuple(read(str(part)) for part in parts)


def _read_texts(text: str) -> tuple[str, ...]:
    """One item, as it is; several are a JSON list of strings, which an environment variable needs."""
    try:
        parts = json.loads(text) if text.startswith("[") else None
    except ValueError:
        parts = None
    if isinstance(parts, list) and parts and all(isinstance(part, str) for part in parts):
        return tuple(parts)
    return (text,)


def _read_text(value: Any) -> str:
    """An item in a file. What YAML took for something else is not guessed back: yes, 0123 and 1e3 are text no more."""
    if not isinstance(value, str):
        raise ArgumentTypeError(f"YAML takes this for {type(value).__name__}, not for text; write it in quotes")
    return value


def _read_choice(text: str, choices: dict[str, Any]) -> Any:
    if text not in choices:
        raise ArgumentTypeError(f"{text!r} is not one of {', '.join(choices)}")
    return choices[text]


def _read_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a number") from None

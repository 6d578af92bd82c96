"""Makes minijinja render a chat template as transformers does with Jinja: block trimming, `raise_exception`,
`strftime_now`, a `tojson` without HTML escapes, Python's string methods, undefined values that print as nothing.
"""

import json
import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import minijinja

from saccade.errors import ConfigError

TEMPLATE = "chat"  # its name
FUEL = 5_000_000  # instructions of the template VM. A turn costs 100 to 300; using up all of it takes about 0.2 s
MAX_INDENT = 64
# Tells training scripts where to compute the loss. Like "with", it prints its content and keeps variables inside.
_GENERATION_TAG = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
# Jinja keeps the line break behind this tag.
_RAW_TAG = re.compile(r"(\{%[-+]?\s*raw\s*)%\}")
_LINE_END = re.compile(r"\r\n?")
_ESCAPED_MARK = re.compile(r"\\u(fd[de][0-9a-f])")


class RefusalError(Exception):
    """A template called raise_exception."""


@dataclass(frozen=True)
class ExactFloat:
    """A float that prints as in Python. minijinja would print 1e-07 as 0.0000001, and give 2.0 to a filter as 2. To
    minijinja it is no number: it is true or false like one, but cannot be compared with one or calculated with."""

    value: float

    def __bool__(self) -> bool:
        return self.value != 0

    def __str__(self) -> str:
        return repr(self.value)

    __repr__ = __str__


def with_exact_floats(value: Any) -> Any:
    """A copy of JSON-like data. Floats that minijinja prints like Python stay numbers."""
    if isinstance(value, dict):
        return {key: with_exact_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [with_exact_floats(item) for item in value]
    if isinstance(value, float) and (value.is_integer() or "e" in repr(value)):
        return ExactFloat(value)
    return value


def with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """A copy of a message whose tool calls have their arguments as JSON text."""
    calls = [
        call | {"function": call["function"] | {"arguments": _to_json(call["function"]["arguments"])}}
        if isinstance(call["function"].get("arguments"), dict)
        else call
        for call in message.get("tool_calls", ())
    ]
    return message | {"tool_calls": calls} if calls else message


def compile_template(source: str) -> minijinja.Environment:
    """An environment with the template, as TEMPLATE."""
    environment = minijinja.Environment(
        fuel=FUEL,
        debug=False,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined_behavior="lenient",
        auto_escape_callback=lambda name: False,
        pycompat=True,
        filters={"tojson": _to_json, "length": _length, "count": _length, "items": _items},
        tests={"iterable": _is_iterable, "sequence": _is_sequence, "number": _is_number, "float": _is_float},
        globals={"raise_exception": _raise_exception, "strftime_now": lambda pattern: datetime.now().strftime(pattern)},
    )
    source = _RAW_TAG.sub(r"\1+%}", _LINE_END.sub("\n", source))
    source = _GENERATION_TAG.sub(r"\1\2with\3", source)
    try:
        environment.add_template(TEMPLATE, source)
    except minijinja.TemplateError as error:
        raise ConfigError(f"the chat template does not compile: {error.kind} in line {error.line}") from None
    return environment


# Filters and tests get None for undefined values as well: as in Jinja they are empty, but not iterable as there.


def _length(value: Any) -> int:
    return 0 if value is None else len(value)


def _items(value: Any) -> list[tuple[Any, Any]]:
    return [] if value is None else list(value.items())


def _is_iterable(value: Any) -> bool:
    return hasattr(value, "__iter__")


def _is_sequence(value: Any) -> bool:
    """What has a length and can be indexed: strings and mappings, too."""
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | ExactFloat)


def _is_float(value: Any) -> bool:
    return isinstance(value, float | ExactFloat)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    if (len(indent) if isinstance(indent, str) else indent or 0) > MAX_INDENT:
        raise ValueError(f"an indent of more than {MAX_INDENT}")
    text = json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_plain,
    )
    if ensure_ascii:  # marks (see special_tokens.py) are not part of the text and must stay unescaped
        text = _ESCAPED_MARK.sub(lambda match: chr(int(match.group(1), 16)), text)
    return text


def _plain(value: Any) -> Any:
    if isinstance(value, ExactFloat):
        return value.value
    raise TypeError(f"{type(value).__name__} is no JSON")


def _raise_exception(message: str) -> None:
    raise RefusalError(message)

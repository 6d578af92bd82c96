"""Turns bodies into checked requests. Long bodies, which may have megabytes, are read in worker threads."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, TypeVar

from pydantic import ValidationError

from saccade.errors import RequestError
from saccade.server.http.body_scan import Body
from saccade.server.http.json_body import parse_json
from saccade.server.requests.protocol import Wire
from saccade.server.server_settings import MAX_BODY_VALUES

Model = TypeVar("Model", bound=Wire)

MAX_SHOWN_FIELDS = 16
_KINDS = frozenset({"str", "bool", "int", "float", "dict", "list", "StreamOptions", "GenerateParams"})
_FIELD_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def read_request(kind: type[Model], body: Body, max_values: int = MAX_BODY_VALUES) -> tuple[Model, tuple[str, ...]]:
    """The checked request, and the names of its ignored fields."""
    raw = parse_json(body, max_values)
    if not isinstance(raw, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    _refuse_unsupported(kind, raw)
    try:
        return kind.model_validate(raw), tuple(_unread(kind, raw))
    except ValidationError as error:
        raise _refusal(error) from None
    except RecursionError:
        raise RequestError("the body is nested too deeply", code="invalid_json") from None


def _refuse_unsupported(kind: type[Wire], raw: dict[str, Any], at: str = "") -> None:
    for name, allowed in kind.UNSUPPORTED.items():
        instead = kind.INSTEAD.get(name)
        if name in raw and raw[name] not in allowed and not (instead and _is_sent(instead, raw)):
            text = f"{at}{name} is not supported; {'leave it out' if instead is None else f'use {instead}'}"
            raise RequestError(text, param=f"{at}{name}", code="unsupported_parameter")
    for name, inner in kind.NESTED.items():
        if isinstance(raw.get(name), dict):
            _refuse_unsupported(inner, raw[name], f"{at}{name}.")


def _is_sent(path: str, raw: Any) -> bool:
    """Clients for several servers send both names."""
    for name in path.split("."):
        raw = raw.get(name) if isinstance(raw, dict) else None
    return raw is not None


def _unread(kind: type[Wire], raw: dict[str, Any], at: str = "") -> Iterator[str]:
    known = _known(kind)
    yield from (f"{at}{name}" for name in raw if name not in known)
    for name, inner in kind.NESTED.items():
        if isinstance(raw.get(name), dict):
            yield from _unread(inner, raw[name], f"{at}{name}.")


@cache
def _known(kind: type[Wire]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in kind.model_fields.items()) | kind.UNSUPPORTED.keys()


def ignored_header(names: tuple[str, ...]) -> tuple[bytes, bytes]:
    shown = [name for name in names if _FIELD_NAME.fullmatch(name)][:MAX_SHOWN_FIELDS]
    return b"x-ignored-fields", ",".join(shown).encode()


def _refusal(error: ValidationError) -> RequestError:
    """The first problem; if the field allows several types, the most deeply nested one. pydantic's texts name types and
    limits, not values."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    same = [item for item in found if item["loc"][:1] == found[0]["loc"][:1]]
    chosen = max(same, key=lambda item: len(_places(item["loc"])))
    param = _path(_places(chosen["loc"]))
    if chosen["type"] == "missing":
        return RequestError(f"{param} is missing", param=param, code="missing_parameter")
    return RequestError(f"{param}: it {_words(str(chosen['msg']))}", param=param, code="invalid_value")


def _words(message: str) -> str:
    """pydantic's message in JSON's terms."""
    message = re.sub(r"^[A-Z][a-z]+ (?=should )| or instance of \w+", "", message)
    return message.replace("valid dictionary", "valid object")


def _places(loc: tuple[int | str, ...]) -> list[int | str]:
    """The path to the problem, without names that the client made up and without the type names of unions."""
    return [place for place in loc if isinstance(place, int) or (_FIELD_NAME.fullmatch(place) and place not in _KINDS)]


def _path(places: list[int | str]) -> str:
    path = ""
    for place in places:
        if isinstance(place, int):
            path += f"[{place}]"
        else:
            path += f".{place}" if path else place
    return path

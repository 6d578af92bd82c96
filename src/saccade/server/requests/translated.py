"""Translates requests of other APIs to chat requests, so that prompts, tools and reasoning have one implementation.
Later errors name the fields that the client sent."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from saccade.errors import RequestError
from saccade.server.requests.protocol import ChatRequest, Wire

Names = Sequence[tuple[str, str]]  # patterns of a chat request's fields, and what the client calls them
_WORD = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class TranslatedChat(ChatRequest):
    """A chat request made from another API's request, never read from a body. `places` has the client's name of each
    message and part."""

    places: dict[str, str]


class ChatBuilder:
    """Collects the messages of a chat request, and where they come from."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: dict[str, str] = {}

    def add(self, message: dict[str, Any], place: str, *, parts: Sequence[str] = ()) -> None:
        at = f"messages[{len(self.messages)}]"
        self.places[at] = place
        self.places |= {f"{at}.content[{j}]": part for j, part in enumerate(parts)}
        self.messages.append(message)


def same_fields(asked: Wire) -> dict[str, Any]:
    """The fields that a chat request has, too. Those with another meaning must be set anew."""
    shared = type(asked).model_fields.keys() & ChatRequest.model_fields.keys()
    return {name: getattr(asked, name) for name in shared}


def rename_error(error: RequestError, places: Mapping[str, str], names: Names) -> None:
    """Replaces the name of a field by the client's, also at the beginning of the text."""
    param = error.param
    if param is None:
        return
    error.param = _client_name(param, places, names)
    text = str(error)
    if text.startswith(param):
        error.args = (error.param + text[len(param) :],)


def wrong(message: str, param: str) -> RequestError:
    return RequestError(f"{param}: {message}", param=param, code="invalid_value")


def unsupported(message: str, param: str) -> RequestError:
    return RequestError(f"{param}: {message}", param=param, code="unsupported_parameter")


def shown(value: Any) -> str:
    """A client-supplied word, if it is short and harmless."""
    return value if isinstance(value, str) and _WORD.fullmatch(value) else "unknown"


def _client_name(param: str, places: Mapping[str, str], names: Names) -> str:
    at = param
    while at:
        if at in places:
            return places[at] + (".detail" if param.endswith(".detail") else "")
        at = at[: max(at.rfind("."), at.rfind("["), 0)]
    for pattern, name in names:
        if re.match(pattern, param):
            return re.sub(pattern, name, param, count=1)
    return param

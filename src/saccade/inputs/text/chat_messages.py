"""Checks OpenAI message lists and normalises them for chat templates. Content is a string or a list of parts. Text
parts go to the template unchanged. An image or video becomes an empty part of its type, so that templates never see
media data; its source goes into a list, in order."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from saccade.errors import RequestError

MediaKind = Literal["image", "video"]

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_KIND_OF_TYPE: dict[str, MediaKind] = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "video": "video",
    "video_url": "video",
}
_TEXT_TYPES = frozenset({"text", "input_text", "output_text"})
# Newer and older role names, mapped to those that templates know: many templates silently drop unknown roles.
_ROLE_NAMES = {"developer": "system", "function": "tool"}
# Message fields that a template may read besides role and content.
_KEPT_FIELDS = ("name", "tool_call_id", "reasoning_content")


@dataclass(frozen=True, slots=True)
class MediaRef:
    """`source` is None for media given separately from the messages; `fps` is None if the part has no frame rate.
    `part` is the part of a message that it comes from."""

    kind: MediaKind
    source: Any
    param: str
    fps: float | None = None
    part: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Adds this part's name to errors raised inside, so that the code that reads the source need not know it."""
        try:
            yield
        except RequestError as error:
            error.param = error.param or self.param
            raise


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: list[dict[str, Any]]
    media: tuple[MediaRef, ...]


def read_messages(messages: Any, roles: frozenset[str] = ROLES) -> Conversation:
    if not isinstance(messages, list | tuple) or not messages:
        raise _wrong("messages must be a list with at least one message", "messages")
    media: list[MediaRef] = []
    read = [_read_message(message, f"messages[{i}]", media, roles) for i, message in _in_order_of_calls(messages)]
    return Conversation(read, tuple(media))


def find_sources(messages: Any) -> list[tuple[int, int, MediaRef]]:
    """(message index, part index, media) for every image and video with a source. Skips invalid messages and parts."""
    found = []
    for i, message in enumerate(_listed(messages)):
        for j, part in enumerate(_listed(message.get("content") if isinstance(message, dict) else None)):
            type_ = (part.get("type") or _guess_type(part)) if isinstance(part, dict) else None
            if isinstance(type_, str) and type_ in _KIND_OF_TYPE:
                found.append((i, j, _read_media(part, type_, f"messages[{i}].content[{j}]")))
    return [one for one in found if one[2].source is not None]


def with_sources(messages: Any, found: Sequence[tuple[int, int, MediaRef]], sources: Sequence[Any]) -> Any:
    """A copy of the messages with new sources for the parts that `find_sources` found."""
    copied = list(messages) if isinstance(messages, list | tuple) else messages
    for (i, j, ref), source in zip(found, sources, strict=True):
        if copied[i] is messages[i]:
            copied[i] = messages[i] | {"content": list(messages[i]["content"])}
        part, key = messages[i]["content"][j], ref.param.rpartition(".")[2]
        value = part[key] if isinstance(part[key], dict) else {}
        copied[i]["content"][j] = part | {key: value | {"url": source}}
    return copied


def flatten_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with string content, for templates that do not support parts."""
    return [
        message
        if isinstance(message["content"], str)
        else message | {"content": "\n".join(part["text"] for part in message["content"] if part["type"] == "text")}
        for message in messages
    ]


def wrap_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with lists of parts, for templates that support nothing else."""
    return [
        message | {"content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message["content"], str)
        else message
        for message in messages
    ]


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _in_order_of_calls(messages: Sequence[Any]) -> list[tuple[int, Any]]:
    """The messages with their places. The results of parallel calls follow their calls: clients send them as they come,
    and many templates leave out the ids that say which is which."""
    keys: list[tuple[int, int]] = []
    calls_at, ids = 0, dict[str, int]()
    for i, message in enumerate(messages):
        fields = message if isinstance(message, dict) else {}
        if fields.get("role") == "tool":
            keys.append((calls_at, ids.get(str(fields.get("tool_call_id")), len(ids)) + 1))
            continue
        calls_at, ids = i, {}
        for call in _listed(fields.get("tool_calls")):
            if isinstance(call, dict) and isinstance(call.get("id"), str):
                ids.setdefault(call["id"], len(ids))
        keys.append((i, 0))
    return sorted(enumerate(messages), key=lambda found: keys[found[0]])


def _read_message(message: Any, param: str, media: list[MediaRef], roles: frozenset[str]) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _wrong("a message must be an object with role and content", param)
    role = message.get("role")
    if not isinstance(role, str) or role not in roles:
        raise _wrong(f"role must be one of {', '.join(sorted(roles))}", f"{param}.role")
    read = {
        "role": _ROLE_NAMES.get(role, role),
        "content": _read_content(message.get("content"), f"{param}.content", media),
    }
    read |= {key: message[key] for key in _KEPT_FIELDS if isinstance(message.get(key), str)}
    if isinstance(message.get("reasoning"), str):
        read.setdefault("reasoning_content", message["reasoning"])
    if message.get("tool_calls"):
        read["tool_calls"] = _read_tool_calls(message["tool_calls"], f"{param}.tool_calls")
    return read


def _read_content(content: Any, param: str, media: list[MediaRef]) -> str | list[dict[str, Any]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise _wrong("content must be a string or a list of parts", param)
    return [_read_part(part, f"{param}[{i}]", media) for i, part in enumerate(content)]


def _read_part(part: Any, param: str, media: list[MediaRef]) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise _wrong("a content part must be an object", param)
    type_ = part.get("type") or _guess_type(part)
    if not isinstance(type_, str):
        raise _wrong("a content part must have a type: text, image_url or video_url", param)
    if type_ in _TEXT_TYPES and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if type_ in _KIND_OF_TYPE:
        media.append(_read_media(part, type_, param))
        return {"type": _KIND_OF_TYPE[type_]}
    raise _wrong("a content part must be text, image_url or video_url with its value", param)


def _guess_type(part: dict[str, Any]) -> str | None:
    """The type of a part without one, from its first known key."""
    return next((key for key in ("text", *_KIND_OF_TYPE) if key in part), None)


def _read_media(part: dict[str, Any], type_: str, param: str) -> MediaRef:
    kind = _KIND_OF_TYPE[type_]
    key = next((key for key in (type_, kind, f"{kind}_url") if part.get(key) is not None), None)
    if key is None and type_ == f"{kind}_url" and type_ in part:
        raise _wrong(f"{type_} must hold a URL", f"{param}.{type_}")
    if key is None:
        return MediaRef(kind, None, param, _read_fps(part, param), part)
    value: Any = part[key]
    fps = _read_fps(part, param)
    if isinstance(value, dict):
        fps = _read_fps(value, f"{param}.{key}") or fps
        value = value.get("url")
    if value is None or (isinstance(value, str) and not value):
        raise _wrong(f"{key} must hold a URL", f"{param}.{key}")
    return MediaRef(kind, value, f"{param}.{key}", fps, part)


def _read_fps(part: dict[str, Any], param: str) -> float | None:
    fps = part.get("fps")
    if fps is None:
        return None
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0.001 <= fps < 1000:
        raise _wrong("fps must be a number from 0.001 to below 1000", f"{param}.fps")
    return float(fps)


def _read_tool_calls(calls: Any, param: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple) or not all(isinstance(call, dict) for call in calls):
        raise _wrong("tool_calls must be a list of objects", param)
    return [_read_tool_call(call, f"{param}[{i}]") for i, call in enumerate(calls)]


def _read_tool_call(call: dict[str, Any], param: str) -> dict[str, Any]:
    """Arguments are JSON text in the API; templates expect an object. Other text is given to them as it is: a model
    that was cut off may have written it, and clients send its message back."""
    function = call.get("function")
    if not isinstance(function, dict):
        raise _wrong("a tool call must have a function", param)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    return call | {"function": function | {"arguments": arguments}}


def _wrong(message: str, param: str) -> RequestError:
    return RequestError(f"{param}: {message}", param=param, code="invalid_messages")

"""Tools of OpenAI's Responses API as those of a chat request. The model sees a function of a namespace as
`namespace__name`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from saccade.server.requests.translated import shown, unsupported, wrong

# Agents offer these with every request, whether the user wants them or not. Nothing here can run them.
LEFT_OUT = frozenset({"web_search", "web_search_preview", "image_generation", "tool_search"})
_FUNCTION = frozenset({"name", "description", "parameters", "strict"})
Tools = Sequence[dict[str, Any]] | None


@dataclass(frozen=True, slots=True)
class CallName:
    """The client's name of a function."""

    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class ReadTools:
    """The tools of a chat request, the client's names of those in namespaces by the model's, and the client's places of
    those that have another place here."""

    tools: list[dict[str, Any]]
    names: dict[str, CallName]
    places: dict[str, str]


def model_name(name: str, namespace: Any) -> str:
    """The name that the model sees."""
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


def kept_tools(tools: Tools) -> list[dict[str, Any]]:
    return [tool for tool in tools or () if not _is_left_out(tool)]


def left_out(tools: Tools) -> tuple[str, ...]:
    """The types of the tools that are left out, as ignored fields."""
    return tuple(f"tools.{tool['type']}" for tool in tools or () if _is_left_out(tool))


def read_tools(tools: Tools) -> ReadTools:
    read = ReadTools([], {}, {})
    for i, tool in enumerate(tools or ()):
        at = f"tools[{i}]"
        if tool.get("type") == "namespace":
            _add_namespace(read, tool, at)
        elif not _is_left_out(tool):
            _add(read, _function(tool, at), at)
    return read


def tool_choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        kind = shown(choice.get("type"))
        raise unsupported(f"type {kind} is not supported; use none, auto, required or a function", "tool_choice")
    name = choice.get("name")
    return {"name": model_name(name, choice.get("namespace")) if isinstance(name, str) else name}


def _is_left_out(tool: dict[str, Any]) -> bool:
    kind = tool.get("type")
    return isinstance(kind, str) and kind in LEFT_OUT


def _add_namespace(read: ReadTools, tool: dict[str, Any], at: str) -> None:
    namespace, members = tool.get("name"), tool.get("tools")
    if not isinstance(namespace, str) or not isinstance(members, list):
        raise wrong("a namespace needs a name and a list of tools", at)
    for j, member in enumerate(members):
        function = _function(member, f"{at}.tools[{j}]")
        if isinstance(function.get("name"), str):
            name = model_name(function["name"], namespace)
            read.names[name] = CallName(function["name"], namespace)
            function["name"] = name
        _add(read, function, f"{at}.tools[{j}]")


def _add(read: ReadTools, function: dict[str, Any], at: str) -> None:
    place = f"tools[{len(read.tools)}]"
    if place != at:
        read.places[place] = at
    read.tools.append({"type": "function", "function": function})


def _function(tool: Any, at: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        raise unsupported(f"a tool of type {shown(kind)} is not supported; only functions are", at)
    return {key: value for key, value in tool.items() if key in _FUNCTION and value is not None}

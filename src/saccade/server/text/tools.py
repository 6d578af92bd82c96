"""The tools of a request: checks, and a grammar for forced calls."""

import json
import re
from collections.abc import Sequence
from typing import Any

from saccade.errors import RequestError
from saccade.server.text.call_text import CLOSE, OPEN
from saccade.server.text.tool_parser import ToolStyle
from saccade.wire.grammar import Grammar, json_rule

MAX_TOOLS = 1024  # what forced calls of them may cost is limited by the size of their grammar
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def tool_style(template: str | None) -> ToolStyle:
    """How a checkpoint's chat template teaches its model to write calls; most current models follow Hermes."""
    is_llama = template is not None and OPEN not in template and '"parameters"' in template
    return "llama3_json" if is_llama else "hermes"


def check_tools(tools: Any) -> None:
    """Raises unless the tools are functions with distinct names and object schemas."""
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        raise _wrong(f"tools must be a list of 1 to {MAX_TOOLS} functions", "tools")
    names = [_check_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    if len(set(names)) < len(names):
        raise _wrong("tools must have different names", "tools")


def tool_grammar(
    tools: Any, tool_choice: Any, *, style: ToolStyle = "hermes", is_parallel: bool = True
) -> Grammar | None:
    """What the output must look like: None if the model is free ("none", "auto"), calls of any tools for "required",
    one call of a named tool. Always raises for invalid tools."""
    is_free = tool_choice in (None, "none", "auto")
    if tools is not None:
        check_tools(tools)
    elif not is_free:
        raise RequestError("tool_choice needs tools", param="tool_choice", code="invalid_tools")
    if is_free:
        return None
    functions = [tool["function"] for tool in tools]
    if tool_choice != "required":
        functions = [_named(functions, tool_choice)]
    is_many = tool_choice == "required" and is_parallel
    return Grammar("lark", _lark(functions, style, is_many=is_many))


def _check_tool(tool: Any, param: str) -> str:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        raise _wrong("a tool must be of type function", param)
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong("a function must have a name of 1 to 128 letters, digits, _, . or -", f"{param}.function.name")
    parameters = function.get("parameters") or {}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise _wrong("parameters must be a JSON schema of type object", f"{param}.function.parameters")
    return name


def _named(functions: Sequence[dict[str, Any]], choice: Any) -> dict[str, Any]:
    function = choice.get("function", choice) if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    for function in functions:
        if function["name"] == name:
            return function
    raise _wrong("tool_choice must be none, auto, required, or name one of the tools", "tool_choice")


def _lark(functions: Sequence[dict[str, Any]], style: ToolStyle, *, is_many: bool) -> str:
    """Each schema is a separate rule, so that its internal references resolve."""
    key = "arguments" if style == "hermes" else "parameters"
    begin, end, between = (OPEN + "\n", "\n" + CLOSE, "\n") if style == "hermes" else ("", "", "; ")
    lines = [f"start: call ({json.dumps(between)} call)*" if is_many else "start: call"]
    lines.append("call: " + " | ".join(f"call_{i}" for i in range(len(functions))))
    for i, function in enumerate(functions):
        head = f'{begin}{{"name": {json.dumps(function["name"])}, "{key}": '
        schema = {"type": "object"} | (function.get("parameters") or {})
        lines.append(f"call_{i}: {json.dumps(head)} arguments_{i} {json.dumps('}' + end)}")
        lines.append(f"arguments_{i}: {_rule(schema)}")
    return "\n".join(lines)


def _rule(schema: dict[str, Any]) -> str:
    try:
        return json_rule(schema)
    except (ValueError, TypeError, RecursionError):
        raise _wrong("parameters must be a JSON schema", "tools") from None


def _wrong(message: str, param: str) -> RequestError:
    return RequestError(f"{param}: {message}", param=param, code="invalid_tools")

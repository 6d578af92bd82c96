"""Tool calls in a model's text: found while it streams, or forced by a grammar. There are two formats:
- Hermes (Qwen): `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, any number of them, with text around them.
- Llama 3: the whole text is `{"name": "f", "parameters": {...}}`, or several of these separated by `;`.

Text that may begin a call is held back; a call is reported when complete. What looked like a call but is not valid JSON
with a name and an arguments object is returned verbatim as text, except that a call cut off after its name by the
length limit is reported with the arguments so far. Nothing is ever evaluated.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from uuid import uuid4

from saccade.errors import RequestError
from saccade.inputs.markers import split_undecided
from saccade.wire.grammar import Grammar, json_rule

ToolStyle = Literal["hermes", "llama3_json"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# A call up to the brace of its arguments.
_CUT_CALL = re.compile(r'\s*\{\s*"name"\s*:\s*"([A-Za-z0-9_.-]{1,64})"\s*,\s*"(?:arguments|parameters)"\s*:\s*\{')


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Call `index` of the message; `arguments` is JSON text."""

    index: int
    id: str
    name: str
    arguments: str


ToolEvent = Content | ToolCall


def new_call_id() -> str:
    return f"call_{uuid4().hex[:24]}"


class ToolParser(ABC):
    """One per output. Without `is_parallel`, nothing after the first call is reported."""

    def __init__(self, *, is_parallel: bool = True, new_id: Callable[[], str] = new_call_id) -> None:
        self.num_calls = 0  # reported so far
        self._is_parallel, self._new_id = is_parallel, new_id
        self._held = ""

    @abstractmethod
    def push(self, text: str) -> list[ToolEvent]: ...

    @abstractmethod
    def finish(self, *, is_cut: bool = False) -> list[ToolEvent]:
        """The text has ended; `is_cut`: by the length limit, possibly in the middle of a call."""

    def _tell(self, name: str, arguments: str) -> list[ToolEvent]:
        index = self.num_calls
        if index and not self._is_parallel:
            return []
        self.num_calls += 1
        return [ToolCall(index, self._new_id(), name, arguments)]


class HermesParser(ToolParser):
    """Calls between tags. White space next to a call belongs to the format: `_held` may turn out to be blanks before a
    call, or the beginning of its tag."""

    _call: "_OpenCall | None" = None

    def push(self, text: str) -> list[ToolEvent]:
        events: list[ToolEvent] = []
        while text:
            text = self._read_text(text, events) if self._call is None else self._read_call(self._call, text, events)
        return events

    def finish(self, *, is_cut: bool = False) -> list[ToolEvent]:
        """A call without its closing tag still counts if it is complete."""
        events: list[ToolEvent] = []
        if self._call is not None:
            call = self._call
            self._end_call(call.text, call.blank + OPEN + call.text, events, is_cut=is_cut)
            self._call = None
        if self._held.strip() or not self.num_calls:
            self._say(self._held, events)
        self._held = ""
        return events

    def _read_text(self, text: str, events: list[ToolEvent]) -> str:
        """Emits what is certainly text; what follows an opening tag is left to read."""
        held = self._held + text
        before, tag, behind = held.partition(OPEN)
        if tag:
            self._held = ""
            self._say(before.rstrip(), events)
            self._call = _OpenCall(before[len(before.rstrip()) :])
            return behind
        certain, self._held = split_undecided(held, [OPEN], None)
        self._say(certain, events)
        return ""

    def _read_call(self, call: "_OpenCall", text: str, events: list[ToolEvent]) -> str:
        end = call.add(text)
        if end is None:
            return ""
        behind = call.text[end + len(CLOSE) :]
        self._call = None
        self._end_call(call.text[:end], call.blank + OPEN + call.text[: end + len(CLOSE)], events)
        return behind

    def _end_call(self, text: str, whole: str, events: list[ToolEvent], *, is_cut: bool = False) -> None:
        found = _read_call(text, ("arguments", "parameters")) or (_read_cut(text, CLOSE) if is_cut else None)
        if found is None:
            self._say(whole, events)
        else:
            events += self._tell(*found)

    def _say(self, text: str, events: list[ToolEvent]) -> None:
        if text and (self._is_parallel or not self.num_calls):
            events.append(Content(text))


class LlamaParser(ToolParser):
    """A text that begins like an object is held back to its end, when it is known whether all of it is calls."""

    _is_object: bool | None = None  # unknown until the first non-blank character

    def push(self, text: str) -> list[ToolEvent]:
        self._held += text
        if self._is_object is None and text.strip():
            self._is_object = text.lstrip().startswith("{")
        return self._give_back() if self._is_object is False else []

    def finish(self, *, is_cut: bool = False) -> list[ToolEvent]:
        calls = _read_calls(self._held, is_cut=is_cut)
        return [event for call in calls for event in self._tell(*call)] if calls else self._give_back()

    def _give_back(self) -> list[ToolEvent]:
        text, self._held = self._held, ""
        return [Content(text)] if text else []


def new_tool_parser(style: ToolStyle, *, is_parallel: bool = True) -> ToolParser:
    return HermesParser(is_parallel=is_parallel) if style == "hermes" else LlamaParser(is_parallel=is_parallel)


def tool_style(template: str | None) -> ToolStyle:
    """How a checkpoint's chat template teaches its model to write calls; most current models follow Hermes."""
    is_llama = template is not None and OPEN not in template and '"parameters"' in template
    return "llama3_json" if is_llama else "hermes"


def check_tools(tools: Any) -> None:
    """Raises unless tools are functions with distinct names and object schemas."""
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        raise _wrong(f"tools must be a list of 1 to {MAX_TOOLS} functions", "tools")
    names = [_check_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    if len(set(names)) < len(names):
        raise _wrong("tools must have names that differ", "tools")


def tool_grammar(
    tools: Any, tool_choice: Any, *, style: ToolStyle = "hermes", is_parallel: bool = True
) -> Grammar | None:
    """What the output must look like: None if the model is free ("none", "auto"), calls of any tools if one is
    required, one call of the tool if one is named. Always raises for invalid tools."""
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


class _OpenCall:
    """The text of a call as it arrives. A closing tag inside a JSON string does not close it."""

    def __init__(self, blank: str) -> None:
        self.text, self.blank = "", blank
        self._at = 0
        self._is_string = self._is_escaped = False

    def add(self, text: str) -> int | None:
        """Where the closing tag begins, once it is complete."""
        self.text += text
        while self._at < len(self.text):
            char = self.text[self._at]
            if char == "<" and not self._is_string:
                if self.text.startswith(CLOSE, self._at):
                    return self._at
                if CLOSE.startswith(self.text[self._at :]):
                    return None
            self._is_string ^= char == '"' and not self._is_escaped
            self._is_escaped = self._is_string and char == "\\" and not self._is_escaped
            self._at += 1
        return None


def _read_call(text: str, keys: Sequence[str]) -> tuple[str, str] | None:
    try:
        call = json.loads(text, parse_constant=_no_constant)
        return _call_of(call, keys)
    except (ValueError, RecursionError):
        return None


def _read_cut(text: str, end: str = "") -> tuple[str, str] | None:
    """Name and arguments of a call cut off within its arguments, or after them before its `end`."""
    head = _CUT_CALL.match(text)
    if head is None:
        return None
    name, arguments = head.group(1), text[head.end() - 1 :]
    try:
        found, at = json.JSONDecoder(parse_constant=_no_constant).raw_decode(arguments)
    except (ValueError, RecursionError):
        return name, arguments
    rest = arguments[at:].lstrip()
    is_whole = ("}" + end).startswith(rest[:1] + rest[1:].lstrip())
    return (name, json.dumps(found, ensure_ascii=False)) if is_whole else None


def _read_calls(text: str, *, is_cut: bool = False) -> list[tuple[str, str]]:
    decoder, at = json.JSONDecoder(parse_constant=_no_constant), 0
    calls: list[tuple[str, str]] = []
    text = text.strip()
    try:
        while at < len(text):
            call, at = decoder.raw_decode(text, at)
            found = _call_of(call, ("parameters", "arguments"))
            rest = text[at:].lstrip()
            if found is None or (rest and not rest.startswith(";")):
                return []
            calls.append(found)
            rest = rest.removeprefix(";").lstrip()
            at = len(text) - len(rest)
    except (ValueError, RecursionError):
        last = _read_cut(text[at:]) if is_cut else None
        return [] if last is None else [*calls, last]
    return calls


def _call_of(call: Any, keys: Sequence[str]) -> tuple[str, str] | None:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments: Any = next((call[key] for key in keys if key in call), {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments, parse_constant=_no_constant)
    if not isinstance(arguments, dict):
        return None
    return call["name"], json.dumps(arguments, ensure_ascii=False)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _check_tool(tool: Any, param: str) -> str:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        raise _wrong("a tool must be of type function", param)
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong("a function must have a name of 1 to 64 letters, digits, _, . or -", f"{param}.function.name")
    if not isinstance(function.get("parameters") or {}, dict):
        raise _wrong("parameters must be a JSON schema", f"{param}.function.parameters")
    return name


def _named(functions: Sequence[dict[str, Any]], choice: Any) -> dict[str, Any]:
    function = choice.get("function", choice) if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    for function in functions:
        if function["name"] == name:
            return function
    raise _wrong("tool_choice must be none, auto, required, or name one of the tools", "tool_choice")


def _lark(functions: Sequence[dict[str, Any]], style: ToolStyle, *, is_many: bool) -> str:
    """Each schema stays separate, so that its references to itself hold."""
    key = "arguments" if style == "hermes" else "parameters"
    begin, end, between = (OPEN + "\n", "\n" + CLOSE, "\n") if style == "hermes" else ("", "", "; ")
    lines = [f"start: call ({_quoted(between)} call)*" if is_many else "start: call"]
    lines.append("call: " + " | ".join(f"call_{i}" for i in range(len(functions))))
    for i, function in enumerate(functions):
        head = f'{begin}{{"name": {json.dumps(function["name"])}, "{key}": '
        schema = {"type": "object"} | (function.get("parameters") or {})
        lines.append(f"call_{i}: {_quoted(head)} arguments_{i} {_quoted('}' + end)}")
        lines.append(f"arguments_{i}: {_rule(schema)}")
    return "\n".join(lines)


def _rule(schema: dict[str, Any]) -> str:
    try:
        return json_rule(schema)
    except (ValueError, TypeError, RecursionError):
        raise _wrong("parameters must be a JSON schema", "tools") from None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _wrong(message: str, param: str) -> RequestError:
    return RequestError(f"{param}: {message}", param=param, code="invalid_tools")

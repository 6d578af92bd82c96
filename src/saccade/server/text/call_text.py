"""The text of tool calls, read at once or character by character as it arrives. Nothing is ever evaluated.

Arguments are passed on exactly as the model wrote them, so that a stream adds up to what a whole reply has.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
Call = tuple[str, str]  # name and arguments as JSON
MAX_HEAD_CHARS = 1024
_BLANK = r"[ \t\r\n]*"
# A call up to the brace of its arguments.
_HEAD = re.compile(
    r"B\{B\"name\"B:B\"([A-Za-z0-9_.-]{1,128})\"B,B\"(?:arguments|parameters)\"B:B\{".replace("B", _BLANK)
)


def find_arguments(text: str, start: int = 0) -> tuple[str, int] | None:
    """The name of the call that begins at `start`, and where its arguments begin; None while either is missing."""
    head = _HEAD.match(text, start, start + MAX_HEAD_CHARS)
    return None if head is None else (head.group(1), head.end() - 1)


class OpenCall:
    """The text of a call as it arrives. A closing tag inside a JSON string does not close it."""

    def __init__(self, blank: str) -> None:
        self.text, self.blank = "", blank
        self._at = 0
        self._scan = _Scan()

    def add(self, text: str) -> int | None:
        """Where the closing tag begins, once it is complete."""
        self.text += text
        while self._at < len(self.text):
            char = self.text[self._at]
            if char == "<" and not self._scan.is_string:
                if self.text.startswith(CLOSE, self._at):
                    return self._at
                if CLOSE.startswith(self.text[self._at : self._at + len(CLOSE)]):
                    return None
            self._scan.step(char)
            self._at += 1
        return None


class OpenArguments:
    """The rest of a call as it arrives, from the opening brace of its arguments. The call ends with `close`, or if that
    is empty with its own closing brace."""

    def __init__(self, close: str = "") -> None:
        self.is_complete = False  # the arguments, not the call
        self._close = close
        self._scan = _Scan()
        self._held = ""  # may be the closing tag

    def add(self, text: str) -> tuple[str, str | None]:
        """What the text adds to the arguments, and the text after the call, once that has ended."""
        text, self._held = self._held + text, ""
        end = 0 if self.is_complete else None  # of the arguments, in the text
        for at, char in enumerate(text):
            if char == "<" and self._close and not self._scan.is_string:
                tag = text[at : at + len(self._close)]
                if tag == self._close:
                    return text[: at if end is None else end], text[at + len(tag) :]
                if at + len(tag) == len(text) and self._close.startswith(tag):
                    self._held = tag
                    return text[: at if end is None else end], None
            self._scan.step(char)
            if self._scan.depth <= 0 and end is None:
                self.is_complete, end = True, at + 1
            elif self._scan.depth < 0 and not self._close:
                return text[:end], text[at + 1 :]
        return text[:end], None


def is_whole(arguments: str) -> bool:
    """Whether the arguments reach their closing brace."""
    found = OpenArguments()
    found.add(arguments)
    return found.is_complete


class _Scan:
    """Whether the next character of JSON is inside a string, and inside how many brackets."""

    def __init__(self) -> None:
        self.depth = 0
        self.is_string = self._is_escaped = False

    def step(self, char: str) -> None:
        if self.is_string:
            self.is_string = char != '"' or self._is_escaped
            self._is_escaped = char == "\\" and not self._is_escaped
        elif char == '"':
            self.is_string = True
        else:
            self.depth += (char in "{[") - (char in "}]")


def read_call(text: str, keys: Sequence[str]) -> Call | None:
    try:
        call = json.loads(text, parse_constant=_no_constant)
        return _call_of(call, text, 0, keys)
    except (ValueError, RecursionError):
        return None


def read_cut(text: str, end: str = "") -> Call | None:
    """Name and arguments of a call that was cut off within its arguments, or between them and its `end`."""
    head = find_arguments(text)
    if head is None:
        return None
    name, arguments = head[0], text[head[1] :]
    try:
        at = _DECODER.raw_decode(arguments)[1]
    except (ValueError, RecursionError):
        return name, arguments
    rest = arguments[at:].lstrip()
    is_whole = ("}" + end).startswith(rest[:1] + rest[1:].lstrip())
    return (name, arguments[:at]) if is_whole else None


def read_calls(text: str, *, is_cut: bool = False) -> list[Call]:
    """Calls separated by `;`; none if the text has anything else."""
    at, calls = 0, list[Call]()
    text = text.strip()
    try:
        while at < len(text):
            begin = at
            call, at = _DECODER.raw_decode(text, at)
            found = _call_of(call, text, begin, ("parameters", "arguments"))
            rest = text[at:].lstrip()
            if found is None or (rest and not rest.startswith(";")):
                return []
            calls.append(found)
            rest = rest.removeprefix(";").lstrip()
            at = len(text) - len(rest)
    except (ValueError, RecursionError):
        last = read_cut(text[at:]) if is_cut else None
        return [] if last is None else [*calls, last]
    return calls


def _call_of(call: Any, text: str, start: int, keys: Sequence[str]) -> Call | None:
    """`call` is the JSON value that begins at `start`."""
    if not isinstance(call, dict):
        return None
    if (head := find_arguments(text, start)) is not None:
        return head[0], text[head[1] : _DECODER.raw_decode(text, head[1])[1]]
    if not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments: Any = next((call[key] for key in keys if key in call), {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments, parse_constant=_no_constant)
    return (call["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)

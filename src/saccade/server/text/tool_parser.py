"""Tool calls in a model's text, parsed as it arrives. There are two formats:
- Hermes (Qwen): `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, any number of them, with text around them.
- Llama 3: the whole text is `{"name": "f", "parameters": {...}}`, or several of these separated by `;`.

Text that may begin a call is held back. What looked like a call but is not valid JSON with a name and an arguments
object is returned verbatim as text, except that a call cut off after its name, by the length limit, a stop string or a
stop token (`is_cut`), is reported with the arguments so far. In a stream (`is_streamed`) a call is reported as soon as
its arguments begin. These follow piece by piece as the model writes them, valid or not. Valid calls come out the same
either way.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal
from uuid import uuid4

from saccade.inputs.text.markers import split_undecided
from saccade.server.text.call_text import (
    CLOSE,
    MAX_HEAD_CHARS,
    OPEN,
    OpenArguments,
    OpenCall,
    find_arguments,
    is_whole,
    read_call,
    read_calls,
    read_cut,
)

ToolStyle = Literal["hermes", "llama3_json"]


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """Call `index` of the message; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments, as JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    index: int


ToolEvent = Content | CallBegin | CallArguments | CallEnd


def new_call_id() -> str:
    return f"call_{uuid4().hex[:24]}"


class ToolParser(ABC):
    """One per output. Without `is_parallel`, nothing after the first call is reported."""

    def __init__(
        self, *, is_parallel: bool = True, is_streamed: bool = False, new_id: Callable[[], str] = new_call_id
    ) -> None:
        self.num_calls = 0  # reported so far
        self.has_unfinished = False  # the last of them has only a part of its arguments
        self._is_parallel, self._is_streamed, self._new_id = is_parallel, is_streamed, new_id
        self._is_reported = False  # whether the current call is reported
        self._arguments: OpenArguments | None = None  # of the call being streamed
        self._held = ""

    def push(self, text: str) -> list[ToolEvent]:
        events: list[ToolEvent] = []
        while text:
            text = (
                self._read_on(text, events) if self._arguments is None else self._stream(self._arguments, text, events)
            )
        return events

    def finish(self, *, is_cut: bool = False) -> list[ToolEvent]:
        """Ends the text. `is_cut`: possibly in the middle of a call."""
        events: list[ToolEvent] = []
        if self._arguments is not None and not self._arguments.is_complete:
            self.has_unfinished = self._is_reported
            self._end(events)
        self._arguments = None
        self._read_end(events, is_cut=is_cut)
        return events

    @abstractmethod
    def _read_on(self, text: str, events: list[ToolEvent]) -> str:
        """Appends to the events, and returns the text that is left to read."""

    @abstractmethod
    def _read_end(self, events: list[ToolEvent], *, is_cut: bool) -> None: ...

    def _stream(self, arguments: OpenArguments, text: str, events: list[ToolEvent]) -> str:
        was_complete = arguments.is_complete
        piece, behind = arguments.add(text)
        self._grow(piece, events)
        if not was_complete and (arguments.is_complete or behind is not None):
            self._end(events)
        if behind is not None:
            self._arguments = None
        return behind or ""

    def _say(self, text: str, events: list[ToolEvent]) -> None:
        if text and (self._is_parallel or not self.num_calls):
            events.append(Content(text))

    def _tell(self, name: str, arguments: str, events: list[ToolEvent]) -> None:
        self._begin(name, events)
        self._grow(arguments, events)
        self.has_unfinished |= self._is_reported and not is_whole(arguments)
        self._end(events)

    def _begin(self, name: str, events: list[ToolEvent]) -> None:
        self._is_reported = self._is_parallel or not self.num_calls
        if self._is_reported:
            events.append(CallBegin(self.num_calls, self._new_id(), name))
            self.num_calls += 1

    def _grow(self, text: str, events: list[ToolEvent]) -> None:
        if text and self._is_reported:
            events.append(CallArguments(self.num_calls - 1, text))

    def _end(self, events: list[ToolEvent]) -> None:
        if self._is_reported:
            events.append(CallEnd(self.num_calls - 1))


class HermesParser(ToolParser):
    """Calls between tags. White space next to a call belongs to the format. `_held` may be blanks before a call, or the
    beginning of its tag."""

    _call: OpenCall | None = None

    def _read_on(self, text: str, events: list[ToolEvent]) -> str:
        return self._read_text(text, events) if self._call is None else self._read_call(self._call, text, events)

    def _read_end(self, events: list[ToolEvent], *, is_cut: bool) -> None:
        """A call without its closing tag still counts if it is complete."""
        if (call := self._call) is not None:
            self._end_call(call.text, call.blank + OPEN + call.text, events, is_cut=is_cut)
        if self._held.strip() or not self.num_calls:
            self._say(self._held, events)
        self._held = ""

    def _read_text(self, text: str, events: list[ToolEvent]) -> str:
        """Emits what is certainly text, and returns what follows an opening tag."""
        held = self._held + text
        before, tag, behind = held.partition(OPEN)
        if tag:
            self._held = ""
            self._say(before.rstrip(), events)
            self._call = OpenCall(before[len(before.rstrip()) :])
            return behind
        certain, self._held = split_undecided(held, [OPEN], None)
        self._say(certain, events)
        return ""

    def _read_call(self, call: OpenCall, text: str, events: list[ToolEvent]) -> str:
        end = call.add(text)
        if self._is_streamed and (head := find_arguments(call.text)) is not None:
            self._call, self._arguments = None, OpenArguments(CLOSE)
            self._begin(head[0], events)
            return call.text[head[1] :]
        if end is None:
            return ""
        behind = call.text[end + len(CLOSE) :]
        self._call = None
        self._end_call(call.text[:end], call.blank + OPEN + call.text[: end + len(CLOSE)], events)
        return behind

    def _end_call(self, text: str, whole: str, events: list[ToolEvent], *, is_cut: bool = False) -> None:
        found = read_call(text, ("arguments", "parameters")) or (read_cut(text, CLOSE) if is_cut else None)
        if found is None:
            self._say(whole, events)
        else:
            self._tell(*found, events)


class LlamaParser(ToolParser):
    """A text that begins like an object is held back to its end, which tells whether all of it is calls. In a stream it
    is held until its arguments begin, and anything but another call after a call is text."""

    _is_text = False  # the rest is text
    _has_call = False  # before the held text
    _later: list[str] | None = None  # after the held text, once only the end can tell what it is

    def _read_on(self, text: str, events: list[ToolEvent]) -> str:
        if self._later is not None:
            self._later.append(text)
            return ""
        self._held += text
        begin = self._held.lstrip()
        if self._has_call and begin:
            self._is_text = self._is_text or not begin.startswith(";")
            begin = begin[1:].lstrip()
        self._is_text = self._is_text or not "{".startswith(begin[:1])
        if self._is_text:
            self._give_back(events)
        elif self._is_streamed and (head := find_arguments(begin)) is not None:
            self._held, self._has_call, self._arguments = "", True, OpenArguments()
            self._begin(head[0], events)
            return begin[head[1] :]
        elif len(begin) >= MAX_HEAD_CHARS:
            self._later = []
        return ""

    def _read_end(self, events: list[ToolEvent], *, is_cut: bool) -> None:
        self._held += "".join(self._later or ())
        held = self._held.strip().removeprefix(";" if self._has_call else "")
        calls = read_calls(held, is_cut=is_cut)
        for call in calls:
            self._tell(*call, events)
        if calls or (self._has_call and not held.strip()):
            self._held = ""
        self._give_back(events)

    def _give_back(self, events: list[ToolEvent]) -> None:
        text, self._held = self._held, ""
        self._say(text, events)


def new_tool_parser(style: ToolStyle, *, is_parallel: bool = True, is_streamed: bool = False) -> ToolParser:
    new = HermesParser if style == "hermes" else LlamaParser
    return new(is_parallel=is_parallel, is_streamed=is_streamed)

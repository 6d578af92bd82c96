"""Replies of OpenAI's Responses API: output items, whole or as events."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import time
from typing import Any

from saccade.client.stream import Delta
from saccade.inputs.text.tokenizer import Tokenizer
from saccade.server.http.events import StreamFormat, named_event
from saccade.server.http.exchange import HttpExchange
from saccade.server.http.json_body import is_json
from saccade.server.http_errors import HttpError, aborted
from saccade.server.replies.logprobs import chat_entries
from saccade.server.replies.reply import Reply
from saccade.server.requests.intake import RequestJob
from saccade.server.requests.protocol import ChatRequest
from saccade.server.requests.responses_request import ResponsesChat
from saccade.server.requests.responses_tools import CallName
from saccade.server.routes.chat import Event, new_chat_choice
from saccade.server.service import Service
from saccade.server.text.reasoning import CLOSE, Reasoning
from saccade.server.text.tool_parser import CallArguments, CallBegin, CallEnd, Content

Fields = dict[str, Any]


class ResponsesReply(Reply):
    job: RequestJob[ChatRequest]

    def __init__(self, service: Service, exchange: HttpExchange, job: RequestJob[ChatRequest]) -> None:
        super().__init__(service, exchange, job)
        self._choice = new_chat_choice(service, job)
        assert isinstance(job.request, ResponsesChat)
        self._items = ItemWriter(exchange.unique_id, job.request.call_names)
        self._head = self._echo()
        self._status = "in_progress"
        self._details: Fields | None = None
        self._error: Fields | None = None
        self._num_events = 0
        self._num_thought = 0  # tokens before the answer
        self._is_thought_over = False
        self._end_of_thought = self.tokenizer.token_id(CLOSE)  # None if that is several tokens
        self._scores = TextScores(self.tokenizer, job.params.logprobs, self._end_of_thought)

    def take(self, index: int, delta: Delta) -> bytes:
        if delta.finish_reason == "abort":
            raise aborted()
        events = self._opening()
        self._scores.push(delta)
        for event in self._choice.read(delta):
            events += self._items.add(event, self._scores.take(event))
        self._count_thought(delta.token_ids)
        if delta.finish_reason is not None:
            events += self._finish(is_cut=delta.finish_reason == "length")
        return self._write(events) if self.job.request.stream else b""

    def body(self) -> Any:
        return self._response()

    def ending(self) -> bytes:
        """The last event, which has the usage."""
        last = {"type": f"response.{self._status}", "response": self._response()}
        return self._write([last]) if self.job.request.stream else b""

    def stream_format(self) -> StreamFormat:
        return StreamFormat(done=b"", failure=self._fail)

    def _count_thought(self, token_ids: Sequence[int]) -> None:
        """Tokens of a slow client come together, so those of the answer may follow in the same delta."""
        if self._is_thought_over:
            return
        end = next((i + 1 for i, token in enumerate(token_ids) if token == self._end_of_thought), None)
        self._is_thought_over = self._items.has_answer or end is not None
        if end is not None or not self._is_thought_over:
            self._num_thought += len(token_ids) if end is None else end

    def _opening(self) -> list[Fields]:
        if self._num_events or not self.job.request.stream:
            return []
        return [{"type": f"response.{name}", "response": self._response()} for name in ("created", "in_progress")]

    def _finish(self, *, is_cut: bool) -> list[Fields]:
        self._status = "incomplete" if is_cut else "completed"
        self._details = {"reason": "max_output_tokens"} if is_cut else None
        events = self._items.close(self._status)
        if self._head["store"]:
            self.service.responses.finish(*response_key(self.exchange), self._items.done)
        return events

    def _fail(self, error: HttpError) -> bytes:
        events = self._opening()
        self._status = "failed"
        self._error = {"code": "server_error" if error.status >= 500 else "invalid_prompt", "message": str(error)}
        return self._write([*events, {"type": "response.failed", "response": self._response()}])

    def _write(self, events: list[Fields]) -> bytes:
        first, self._num_events = self._num_events, self._num_events + len(events)
        numbered = [event | {"sequence_number": first + i} for i, event in enumerate(events)]
        return b"".join(named_event(event["type"], event) for event in numbered)

    def _response(self) -> Fields:
        is_over = self._status in ("completed", "incomplete")
        return {
            **self._head,
            "status": self._status,
            "completed_at": int(time()) if self._status == "completed" else None,
            "error": self._error,
            "incomplete_details": self._details,
            "output": list(self._items.done),
            "usage": self._usage() if is_over else None,
        }

    def _echo(self) -> Fields:
        """The fields that do not change while the answer grows; most repeat the request."""
        assert isinstance(self.job.request, ResponsesChat)
        asked, params = self.job.request.asked, self.job.params
        text = asked.text.model_dump(by_alias=True, exclude_none=True) if asked.text is not None else {}
        return {
            "id": response_key(self.exchange)[1],
            "object": "response",
            "created_at": int(time()),
            "model": self.job.model,
            "background": False,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "reasoning": asked.reasoning.model_dump() if asked.reasoning is not None else None,
            "store": self.job.request.kept is not None,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}} | text,
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": asked.user,
        }

    def _usage(self) -> Fields:
        usage = self.answer.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._num_thought if self._items.has_reasoning else 0},
            "total_tokens": usage["total_tokens"],
        }


def response_key(exchange: HttpExchange) -> tuple[str, str]:
    """The caller, and the id of the response."""
    assert exchange.caller is not None, "its key was checked"
    return exchange.caller.name, f"resp_{exchange.unique_id}"


def response_of(item_id: str) -> str:
    """The id of the response that an item belongs to."""
    return f"resp_{item_id.partition('_')[2].rpartition('_')[0]}"


class TextScores:
    """Log-probabilities of the tokens of a text, without those of reasoning, calls and special tokens. They are held
    until their text comes, since that may begin a call."""

    def __init__(self, tokenizer: Tokenizer, num_top: int | None, end_of_thought: int | None) -> None:
        self._tokenizer, self._num_top, self._end_of_thought = tokenizer, num_top, end_of_thought
        self._held: list[Fields] = []

    def push(self, delta: Delta) -> None:
        if self._num_top is None:
            return
        entries = chat_entries(self._tokenizer, delta.token_ids, delta.logprobs or (), self._num_top)
        for token, entry in zip(delta.token_ids, entries, strict=False):
            if token == self._end_of_thought:
                self._held.clear()
            elif token not in self._tokenizer.special_ids:
                self._held.append(entry)

    def take(self, event: Event) -> list[Fields]:
        found, self._held = self._held, []
        return found if isinstance(event, Content) else []


@dataclass(slots=True)
class _OpenItem:
    """A message or reasoning item that is still growing."""

    item: Fields
    part: Fields
    events: str  # prefix of the names of its events
    texts: list[str] = field(default_factory=list)
    scores: list[Fields] = field(default_factory=list)


class ItemWriter:
    """Output items in order of arrival, and the events that announce them. One is open at a time."""

    def __init__(self, unique_id: str, call_names: Mapping[str, CallName]) -> None:
        self.done: list[Fields] = []
        self.has_reasoning = self.has_answer = False
        self._open: _OpenItem | None = None
        self._call: Fields | None = None  # being written
        self._arguments: list[str] = []
        self._unique_id, self._call_names = unique_id, call_names

    def add(self, event: Event, scores: Sequence[Fields]) -> list[Fields]:
        """`scores` are the log-probabilities of a text's tokens."""
        match event:
            case Reasoning(text=text):
                self.has_reasoning = True
                return self._grow("reasoning", text)
            case Content(text=text):
                self.has_answer = True
                return self._grow("message", text, scores)
            case CallBegin():
                self.has_answer = True
                return self._begin_call(event)
            case CallArguments(text=text):
                assert self._call is not None, "arguments belong to a call that was begun"
                self._arguments.append(text)
                return [_event("function_call_arguments.delta", self._at(self._call), delta=text)]
            case CallEnd():
                return self._end_call()

    def close(self, status: str = "completed") -> list[Fields]:
        found, self._open = self._open, None
        if found is None:
            return []
        part = found.part | {"text": "".join(found.texts)}
        if "logprobs" in part:
            part["logprobs"] = found.scores
        at = self._at(found.item) | {"content_index": 0}
        told: Fields = {name: part[name] for name in ("text", "logprobs") if name in part}
        events: list[Fields] = [{"type": f"{found.events}.done", **at, **told}]
        events.append(_event("content_part.done", at, part=part))
        return events + self._end(found.item | {"status": status, "content": [part]})

    def _grow(self, kind: str, text: str, scores: Sequence[Fields] = ()) -> list[Fields]:
        events: list[Fields] = []
        if self._open is None or self._open.item["type"] != kind:
            events = self.close()
            self._open = self._reasoning() if kind == "reasoning" else self._message()
            at = self._at(self._open.item) | {"content_index": 0}
            events += [self._begin(self._open.item), _event("content_part.added", at, part=self._open.part)]
        found = self._open
        found.texts.append(text)
        found.scores += scores
        more: Fields = {"logprobs": scores} if "logprobs" in found.part else {}
        at = self._at(found.item) | {"content_index": 0}
        return [*events, {"type": f"{found.events}.delta", **at, "delta": text, **more}]

    def _message(self) -> _OpenItem:
        item = {
            "id": self._new_id("msg"),
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return _OpenItem(item, part, "response.output_text")

    def _reasoning(self) -> _OpenItem:
        item = {"id": self._new_id("rs"), "type": "reasoning", "summary": [], "status": "in_progress", "content": []}
        return _OpenItem(item, {"type": "reasoning_text", "text": ""}, "response.reasoning_text")

    def _begin_call(self, call: CallBegin) -> list[Fields]:
        events = self.close()
        found = self._call_names.get(call.name) or CallName(call.name)
        item = {"id": self._new_id("fc"), "type": "function_call", "call_id": call.id, "name": found.name}
        if found.namespace is not None:
            item["namespace"] = found.namespace
        self._call, self._arguments = item, []
        return [*events, self._begin(item | {"arguments": "", "status": "in_progress"})]

    def _end_call(self) -> list[Fields]:
        item, arguments = self._call, "".join(self._arguments)
        assert item is not None, "a call that was not begun has ended"
        self._call = None
        status = "completed" if is_json(arguments) else "incomplete"  # cut off by the length limit
        done = _event("function_call_arguments.done", self._at(item), name=item["name"], arguments=arguments)
        return [done, *self._end(item | {"arguments": arguments, "status": status})]

    def _begin(self, item: Fields) -> Fields:
        return _event("output_item.added", {"output_index": len(self.done)}, item=item)

    def _end(self, item: Fields) -> list[Fields]:
        self.done.append(item)
        return [_event("output_item.done", {"output_index": len(self.done) - 1}, item=item)]

    def _at(self, item: Fields) -> Fields:
        return {"item_id": item["id"], "output_index": len(self.done)}

    def _new_id(self, prefix: str) -> str:
        return f"{prefix}_{self._unique_id}_{len(self.done)}"


def _event(kind: str, at: Fields, **more: Any) -> Fields:
    return {"type": f"response.{kind}", **at, **more}

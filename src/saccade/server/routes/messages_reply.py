"""Replies of Anthropic's Messages API: content blocks, whole or as events."""

from typing import Any

import orjson

from saccade.client.stream import Delta
from saccade.server.http.events import StreamFormat, named_event
from saccade.server.http.exchange import HttpExchange
from saccade.server.http.json_body import is_json
from saccade.server.http_errors import HttpError, aborted
from saccade.server.replies.reply import Reply
from saccade.server.requests.intake import RequestJob
from saccade.server.requests.protocol import ChatRequest
from saccade.server.routes.chat import Event, new_chat_choice
from saccade.server.service import Service
from saccade.server.text.reasoning import Reasoning
from saccade.server.text.tool_parser import CallArguments, CallBegin, CallEnd, Content

Fields = dict[str, Any]
PING = named_event("ping", {"type": "ping"})
_ERROR_TYPES = {413: "request_too_large", 500: "api_error"}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesReply(Reply):
    job: RequestJob[ChatRequest]

    def __init__(self, service: Service, exchange: HttpExchange, job: RequestJob[ChatRequest]) -> None:
        super().__init__(service, exchange, job)
        self._choice = new_chat_choice(service, job)
        self._blocks = BlockWriter()
        self._has_begun = False
        self._end: Fields = {"stop_reason": None, "stop_sequence": None}

    def take(self, index: int, delta: Delta) -> bytes:
        if delta.finish_reason == "abort":
            raise aborted()
        events: list[Fields] = []
        if not self._has_begun:
            events.append({"type": "message_start", "message": self._message([])})
            self._has_begun = True
        for event in self._choice.read(delta):
            events += self._blocks.add(event)
        if delta.finish_reason is not None:
            events += self._blocks.close()
            self._end = self._ending(delta)
        return b"".join(named_event(event["type"], event) for event in events) if self.job.request.stream else b""

    def body(self) -> Any:
        return self._message(self._blocks.whole())

    def ending(self) -> bytes:
        if not self.job.request.stream:
            return b""
        last = {"type": "message_delta", "delta": self._end, "usage": self._usage()}
        return named_event("message_delta", last) + named_event("message_stop", {"type": "message_stop"})

    def stream_format(self) -> StreamFormat:
        return StreamFormat(PING, b"", lambda error: named_event("error", messages_error(error, self.exchange.id)))

    def _message(self, content: list[Fields]) -> Fields:
        head = {"id": f"msg_{self.job.public_id}", "type": "message", "role": "assistant", "model": self.job.model}
        return {**head, "content": content, **self._end, "usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        """This API counts cached tokens apart from the other input."""
        usage = self.answer.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }

    def _ending(self, delta: Delta) -> Fields:
        stop = delta.stop_reason if isinstance(delta.stop_reason, str) else None
        reason = self._choice.end_reason(delta) or "stop"
        if reason == "stop" and stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        if reason == "length" and delta.num_output_tokens < (self.job.params.max_tokens or 0):
            return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
        return {"stop_reason": _STOP_REASONS[reason], "stop_sequence": None}


class BlockWriter:
    """Content blocks in order of arrival, and the events that announce them. One is open at a time."""

    def __init__(self) -> None:
        self._blocks: list[tuple[Fields, list[str]]] = []  # each as it began, and the texts added since
        self._is_open = False

    def add(self, event: Event) -> list[Fields]:
        match event:
            case Reasoning(text=text):
                begun = self._begin({"type": "thinking", "thinking": "", "signature": ""})
                return [*begun, self._delta({"type": "thinking_delta", "thinking": text}, text)]
            case Content(text=text):
                begun = self._begin({"type": "text", "text": ""})
                return [*begun, self._delta({"type": "text_delta", "text": text}, text)]
            case CallBegin(id=call_id, name=name):
                tool_id = "toolu_" + call_id.removeprefix("call_")
                closed = self.close()
                return [*closed, *self._begin({"type": "tool_use", "id": tool_id, "name": name, "input": {}})]
            case CallArguments(text=text):
                return [self._delta({"type": "input_json_delta", "partial_json": text}, text)]
            case CallEnd():
                return self.close()

    def close(self) -> list[Fields]:
        if not self._is_open:
            return []
        self._is_open = False
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def whole(self) -> list[Fields]:
        return [_filled(block, "".join(texts)) for block, texts in self._blocks]

    def _begin(self, block: Fields) -> list[Fields]:
        """Starts a block, unless one of the same type is open."""
        if self._is_open and self._blocks[-1][0]["type"] == block["type"]:
            return []
        closed = self.close()
        self._blocks.append((block, []))
        self._is_open = True
        return [*closed, {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}]

    def _delta(self, delta: Fields, text: str) -> Fields:
        self._blocks[-1][1].append(text)
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}


def messages_error(error: HttpError, request_id: str) -> Fields:
    """Anthropic's envelope, with `param` and `code` added. Clients look for the words of its limit of tokens."""
    found = error.envelope()["error"]
    found["type"] = _ERROR_TYPES.get(error.status, found["type"])
    if error.code == "context_length_exceeded":
        found["message"] = f"prompt is too long: {found['message']}"
    return {"type": "error", "error": found, "request_id": request_id}


def _filled(block: Fields, text: str) -> Fields:
    if block["type"] != "tool_use":
        return block | {block["type"]: text}
    is_whole = is_json(text)  # or cut off by the length limit
    return block | {"input": orjson.Fragment(text)} if is_whole else block

"""POST /v1/chat/completions."""

from dataclasses import dataclass, field, replace
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from saccade.client.stream import Delta
from saccade.errors import RequestError
from saccade.inputs.allowance import Allowance
from saccade.inputs.placeholders import Prompt
from saccade.inputs.sizing import read_sizing
from saccade.models.media import ImageSettings
from saccade.server.chunks import NULL, ChunkWriter
from saccade.server.exchange import HttpExchange
from saccade.server.intake import Recipe, RequestJob, needs_loading, take_in
from saccade.server.logprobs import chat_entries
from saccade.server.protocol import ChatRequest
from saccade.server.reasoning import Reasoning, ReasoningParser, after_reasoning, ends_in_reasoning
from saccade.server.reply import Reply
from saccade.server.request_params import chat_params
from saccade.server.service import Service
from saccade.server.tools import (
    CallArguments,
    CallStarted,
    Content,
    ToolEvent,
    ToolParser,
    check_tools,
    tool_grammar,
    tool_parser,
)
from saccade.wire.grammar import Grammar
from saccade.wire.sampling_params import SamplingParams

Event = Reasoning | ToolEvent


class ChatRecipe(Recipe[ChatRequest]):
    request = ChatRequest
    prompt_param = "messages"

    def params(self, request: ChatRequest) -> SamplingParams:
        return chat_params(request, self.service.limits, self._call_grammar(request))

    def messages(self, request: ChatRequest) -> list[Any] | None:
        return request.messages if needs_loading(request.messages) else None

    def prompts(self, request: ChatRequest, messages: list[Any] | None, allowance: Allowance) -> tuple[Prompt, ...]:
        prompt = self.service.engine.processor.chat(
            request.messages if messages is None else messages,
            tools=request.tools if may_call(request) else None,
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final_message=bool(request.continue_final_message),
            variables=request.chat_template_kwargs,
            images=sized(self.service, request.mm_processor_kwargs),
            allowance=allowance,
        )
        request.messages = []  # the images are in the prompt now
        return (prompt,)

    def settle(self, job: RequestJob[ChatRequest]) -> None:
        """Inside of a reasoning block, structure is for what follows the block."""
        if not self.service.settings.reasoning_parser:
            return
        tokenizer = self.service.engine.processor.tokenizer
        is_continued = bool(job.request.continue_final_message)
        job.is_thinking = ends_in_reasoning(job.prompts[0].token_ids.tolist(), tokenizer, is_continued=is_continued)
        if job.is_thinking and job.params.grammar is not None:
            is_calls = job.request.tool_choice not in (None, "none", "auto")
            job.params = replace(job.params, grammar=after_reasoning(job.params.grammar, is_calls=is_calls))

    def _call_grammar(self, request: ChatRequest) -> Grammar | None:
        """What forces a call where one is asked for."""
        if request.tools is not None:
            check_tools(request.tools)
        elif request.tool_choice not in (None, "none", "auto"):
            raise RequestError("tool_choice needs tools", param="tool_choice", code="invalid_tools")
        is_parallel = request.parallel_tool_calls is not False
        return tool_grammar(request.tools, request.tool_choice, style=self.service.tool_style, is_parallel=is_parallel)


def may_call(request: ChatRequest) -> bool:
    return request.tools is not None and request.tool_choice != "none"


def sized(service: Service, kwargs: Any) -> ImageSettings | None:
    """How large the images of a request are to be, within what the checkpoint and the encoder allow."""
    engine = service.engine
    return read_sizing(kwargs, engine.processor.images, max_tokens=engine.limits.encoder_budget_tokens)


class ChatRoute:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._recipe = ChatRecipe(service)

    async def create(self, request: Request) -> Response:
        exchange = HttpExchange.of(request)
        job = await take_in(self._service, exchange, self._recipe)
        return await ChatReply(self._service, exchange, job).response()


@dataclass(slots=True)
class Choice:
    """One choice as it grows."""

    parser: ToolParser | None
    thoughts: ReasoningParser | None = None
    reasoning: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def read(self, delta: Delta) -> list[Event]:
        """Reasoning, text and calls in what the model wrote; all that was held back comes with the end."""
        is_last, is_cut = delta.finish_reason is not None, delta.finish_reason == "length"
        if self.thoughts is None:
            return [*self._read_answer(delta.text, is_last=is_last, is_cut=is_cut)]
        thought, text = self.thoughts.push(delta.text)
        if is_last:
            more, rest = self.thoughts.finish()
            thought, text = thought + more, text + rest
        return [*([Reasoning(thought)] if thought else []), *self._read_answer(text, is_last=is_last, is_cut=is_cut)]

    def _read_answer(self, text: str, *, is_last: bool, is_cut: bool) -> list[ToolEvent]:
        if self.parser is None:
            return [Content(text)] if text else []
        events = self.parser.push(text)
        return events + self.parser.finish(is_cut=is_cut) if is_last else events

    def reason(self, delta: Delta) -> str | None:
        has_calls = self.parser is not None and self.parser.num_calls > 0
        return "tool_calls" if has_calls and delta.finish_reason == "stop" else delta.finish_reason


class ChatReply(Reply):
    id_prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    job: RequestJob[ChatRequest]

    def __init__(self, service: Service, exchange: HttpExchange, job: RequestJob[ChatRequest]) -> None:
        super().__init__(service, exchange, job)
        is_parallel = job.request.parallel_tool_calls is not False
        # Structure from the first token on leaves no room for a block that the model would open itself.
        self._has_thoughts = bool(service.settings.reasoning_parser) and (job.is_thinking or not job.params.grammar)
        self._shows_thoughts = job.request.include_reasoning is not False
        self._choices = [
            Choice(
                tool_parser(service.tool_style, is_parallel=is_parallel) if may_call(job.request) else None,
                ReasoningParser(is_open=job.is_thinking) if self._has_thoughts else None,
            )
            for _ in range(self.answer.num_choices)
        ]

    def take(self, index: int, delta: Delta) -> None:
        choice = self._choices[index]
        for event in self._shown(choice, delta):
            match event:
                case Reasoning(text=text):
                    choice.reasoning.append(text)
                case Content(text=text):
                    choice.text.append(text)
                case CallStarted(id=call_id, name=name):
                    function = {"name": name, "arguments": ""}
                    choice.calls.append({"id": call_id, "type": "function", "function": function})
                case CallArguments(text=text):
                    choice.calls[-1]["function"]["arguments"] += text
        choice.token_ids += delta.token_ids
        choice.logprobs += self._scores(delta) or ()
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = choice.reason(delta), delta.stop_reason

    def choices(self) -> list[dict[str, Any]]:
        return [self._choice(index, choice) for index, choice in enumerate(self._choices)]

    def opening(self, writer: ChunkWriter, index: int, *, is_first: bool) -> list[bytes]:
        more = b""
        if is_first and self.job.request.return_token_ids:
            more = b',"prompt_token_ids":' + orjson.dumps(self.answer.prompt_ids[0].tolist())
        value = b'"delta":{"role":"assistant","content":""}'
        return [writer.choice(index, value, usage=self.running_usage(), more=more)]

    def contents(self, writer: ChunkWriter, index: int, delta: Delta) -> list[bytes]:
        """A chunk for each event; scores and token ids go with the first."""
        scores = self._scores(delta)
        more = b',"token_ids":' + orjson.dumps(delta.token_ids) if self.job.request.return_token_ids else b""
        values = [_delta(event) for event in self._shown(self._choices[index], delta)]
        if not values and (scores or more):
            values = [b'"delta":{"content":""}']
        logprobs = NULL if scores is None else orjson.dumps({"content": scores, "refusal": None})
        chunks = []
        for value in values:
            chunks.append(writer.choice(index, value, logprobs=logprobs, usage=self.running_usage(), more=more))
            logprobs, more = NULL, b""
        return chunks

    def closing(self, writer: ChunkWriter, index: int, delta: Delta) -> bytes:
        more = b',"stop_reason":' + orjson.dumps(delta.stop_reason)
        finish = orjson.dumps(self._choices[index].reason(delta))
        return writer.choice(index, b'"delta":{}', finish=finish, usage=self.running_usage(), more=more)

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        text, thought = "".join(choice.text), "".join(choice.reasoning)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if choice.calls:
            message |= {"content": text or None, "tool_calls": choice.calls}
        if choice.thoughts is not None and self._shows_thoughts:
            message |= {"content": text or (None if thought else message["content"]), **_named(thought or None)}
        found: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": {"content": choice.logprobs, "refusal": None} if self.job.request.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self.job.request.return_token_ids:
            found["token_ids"] = choice.token_ids
        return found

    def _shown(self, choice: Choice, delta: Delta) -> list[Event]:
        events = choice.read(delta)
        return events if self._shows_thoughts else [event for event in events if not isinstance(event, Reasoning)]

    def _scores(self, delta: Delta) -> list[dict[str, Any]] | None:
        if delta.logprobs is None:
            return None
        return chat_entries(self.tokenizer, delta.token_ids, delta.logprobs, self.job.params.logprobs or 0)


def _named(thought: str | None) -> dict[str, str | None]:
    """Reasoning under both of its names: vLLM's newer one, and the one of SGLang and of older clients."""
    return {"reasoning": thought, "reasoning_content": thought}


def _delta(event: Event) -> bytes:
    match event:
        case Reasoning(text=text):
            return b'"delta":' + orjson.dumps(_named(text))
        case Content(text=text):
            return b'"delta":{"content":' + orjson.dumps(text) + b"}"
        case CallStarted(index=index, id=call_id, name=name):
            function = {"name": name, "arguments": ""}
            call: dict[str, Any] = {"index": index, "id": call_id, "type": "function", "function": function}
        case CallArguments(index=index, text=text):
            call = {"index": index, "function": {"arguments": text}}
    return b'"delta":{"tool_calls":[' + orjson.dumps(call) + b"]}"

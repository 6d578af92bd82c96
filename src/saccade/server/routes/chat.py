"""POST /v1/chat/completions."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
from starlette.responses import Response

from saccade.client.output import Logprobs
from saccade.client.stream import Delta
from saccade.errors import RequestError
from saccade.inputs.allowance import Allowance
from saccade.inputs.placeholders import Prompt
from saccade.server.http.exchange import HttpExchange
from saccade.server.replies.logprobs import chat_entries
from saccade.server.replies.reply import OpenAIReply, ReplyChoice
from saccade.server.requests.intake import PromptRoute, RequestJob
from saccade.server.requests.pooling_protocol import EmbeddingRequest
from saccade.server.requests.protocol import ChatRequest, TokenizeRequest
from saccade.server.requests.request_params import chat_params
from saccade.server.requests.structure import structure_param
from saccade.server.requests.translated import Names, TranslatedChat, rename_error
from saccade.server.service import Service
from saccade.server.text.reasoning import Reasoning, ReasoningParser, after_reasoning, ends_in_reasoning
from saccade.server.text.tool_parser import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    ToolEvent,
    ToolParser,
    new_tool_parser,
)
from saccade.server.text.tools import tool_grammar
from saccade.wire.sampling_params import SamplingParams

Event = Reasoning | ToolEvent


class ChatRoute(PromptRoute[ChatRequest]):
    kind = ChatRequest
    prompt_param = "messages"

    async def reply(self, exchange: HttpExchange, job: RequestJob[ChatRequest]) -> Response:
        return await ChatReply(self.service, exchange, job).response()

    def params(self, request: ChatRequest) -> SamplingParams:
        service, is_parallel = self.service, request.parallel_tool_calls is not False
        calls = tool_grammar(request.tools, request.tool_choice, style=service.tool_style, is_parallel=is_parallel)
        return chat_params(request, service.settings, service.defaults, calls)

    def messages(self, request: ChatRequest) -> list[Any]:
        return request.messages

    def is_simple(self, request: ChatRequest) -> bool:
        return request.tools is None and structure_param(request) is None

    def prompts(self, request: ChatRequest, messages: list[Any], allowance: Allowance) -> tuple[Prompt, ...]:
        tools = request.tools if may_call(request) else None
        prompt = chat_prompt(
            self.service, request, messages, allowance, variables=request.template_variables, tools=tools
        )
        request.messages = []  # the images are in the prompt now
        return (prompt,)

    def settle(self, job: RequestJob[ChatRequest]) -> None:
        """If the prompt ends inside a reasoning block, structure applies to what follows the block."""
        if not self.service.settings.reasoning_parser:
            return
        tokenizer = self.service.engine.processor.tokenizer
        is_continued = bool(job.request.continue_final_message)
        job.is_thinking = ends_in_reasoning(job.prompts[0].token_ids.tolist(), tokenizer, is_continued=is_continued)
        if job.is_thinking and job.params.grammar is not None:
            is_calls = job.request.tool_choice not in (None, "none", "auto")
            job.params = replace(job.params, grammar=after_reasoning(job.params.grammar, is_calls=is_calls))


class TranslatedRoute(ChatRoute):
    """A route of another API over chat completions: errors name the fields that its clients send."""

    names: Names
    format_param: str

    def structure_param(self, request: ChatRequest) -> str:
        return self.format_param if request.response_format is not None else "tools"

    def rename(self, error: RequestError, request: ChatRequest) -> None:
        assert isinstance(request, TranslatedChat), "see `read`"
        rename_error(error, request.places, self.names)


def may_call(request: ChatRequest) -> bool:
    return request.tools is not None and request.tool_choice != "none"


def chat_prompt(
    service: Service,
    request: ChatRequest | TokenizeRequest | EmbeddingRequest,
    messages: list[Any],
    allowance: Allowance,
    *,
    variables: dict[str, Any] | None,
    tools: Any = None,
    has_prompt: bool = True,
) -> Prompt:
    """`has_prompt` is the default of `add_generation_prompt`."""
    wants_prompt = request.add_generation_prompt
    return service.engine.processor.chat(
        messages,
        tools=tools,
        add_generation_prompt=has_prompt if wants_prompt is None else wants_prompt,
        continue_final_message=bool(request.continue_final_message),
        variables=variables,
        images=service.image_sizing(request.mm_processor_kwargs),
        allowance=allowance,
        joins_roles=isinstance(request, TranslatedChat),
    )


@dataclass(slots=True)
class ChatChoice(ReplyChoice):
    tool_parser: ToolParser | None = None
    reasoning_parser: ReasoningParser | None = None
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    shows_reasoning: bool = True

    def read(self, delta: Delta) -> list[Event]:
        """Splits the model's text into reasoning, content and calls; the end releases held-back text."""
        return [event for event in self._split(delta) if self.shows_reasoning or not isinstance(event, Reasoning)]

    def end_reason(self, delta: Delta) -> str | None:
        """A client runs calls on "tool_calls", so that needs all of them to be finished."""
        parser = self.tool_parser
        has_calls = parser is not None and parser.num_calls > 0 and not parser.has_unfinished
        return "tool_calls" if has_calls and delta.finish_reason == "stop" else delta.finish_reason

    def _split(self, delta: Delta) -> list[Event]:
        is_last, text = delta.finish_reason is not None, delta.text
        events: list[Event] = []
        if self.reasoning_parser is not None:
            reasoning, text = self.reasoning_parser.push(text)
            if is_last:
                more, rest = self.reasoning_parser.finish()
                reasoning, text = reasoning + more, text + rest
            events += [Reasoning(reasoning)] if reasoning else []
        if self.tool_parser is None:
            return [*events, Content(text)] if text else events
        events += self.tool_parser.push(text)
        is_cut = delta.finish_reason == "length" or delta.stop_reason is not None
        return [*events, *self.tool_parser.finish(is_cut=is_cut)] if is_last else events


def new_chat_choice(service: Service, job: RequestJob[ChatRequest]) -> ChatChoice:
    is_parallel, is_streamed = job.request.parallel_tool_calls is not False, bool(job.request.stream)
    parser = new_tool_parser(service.tool_style, is_parallel=is_parallel, is_streamed=is_streamed)
    # If structure applies from the first token on, the model cannot open a block itself.
    has_reasoning = bool(service.settings.reasoning_parser) and (job.is_thinking or not job.params.grammar)
    return ChatChoice(
        tool_parser=parser if may_call(job.request) else None,
        reasoning_parser=ReasoningParser(is_open=job.is_thinking) if has_reasoning else None,
        shows_reasoning=job.request.include_reasoning is not False,
    )


class ChatReply(OpenAIReply[ChatChoice]):
    id_prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    closing = b'"delta":{}'
    job: RequestJob[ChatRequest]

    def new_choice(self) -> ChatChoice:
        return new_chat_choice(self.service, self.job)

    def finish_reason(self, choice: ChatChoice, delta: Delta) -> str | None:
        return choice.end_reason(delta)

    def grow(self, choice: ChatChoice, delta: Delta) -> None:
        for event in choice.read(delta):
            match event:
                case Reasoning(text=text):
                    choice.reasoning.append(text)
                case Content(text=text):
                    choice.text.append(text)
                case CallBegin(id=call_id, name=name):
                    function = {"name": name, "arguments": ""}
                    choice.calls.append({"id": call_id, "type": "function", "function": function})
                case CallArguments(index=index, text=text):
                    choice.calls[index]["function"]["arguments"] += text

    def fields(self, index: int, choice: ChatChoice) -> dict[str, Any]:
        text, reasoning = "".join(choice.text), "".join(choice.reasoning)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if choice.calls:
            message |= {"content": text or None, "tool_calls": choice.calls}
        if choice.reasoning_parser is not None and choice.shows_reasoning:
            message |= {"content": text or (None if reasoning else message["content"]), **_named(reasoning or None)}
        has_scores = self.job.request.logprobs
        return {"message": message, "logprobs": self._scores(choice.token_ids, choice.scores) if has_scores else None}

    def opening(self, index: int, *, is_first: bool) -> tuple[bytes, bytes]:
        has_ids = is_first and self.job.request.return_token_ids
        more = b',"prompt_token_ids":' + orjson.dumps(self.answer.prompt_ids[0].tolist()) if has_ids else b""
        return b'"delta":{"role":"assistant","content":""}', more

    def values(self, index: int, delta: Delta) -> list[bytes]:
        values = [value for event in self.choices[index].read(delta) for value in _deltas(event)]
        if not values and (delta.logprobs or self.job.request.return_token_ids):
            return [b'"delta":{"content":""}']
        return values

    def chunk_scores(self, index: int, delta: Delta) -> dict[str, Any]:
        return self._scores(delta.token_ids, delta.logprobs or ())

    def _scores(self, token_ids: Sequence[int], scores: Sequence[Logprobs]) -> dict[str, Any]:
        entries = chat_entries(self.tokenizer, token_ids, scores, self.job.params.logprobs or 0)
        return {"content": entries, "refusal": None}


def _named(reasoning: str | None) -> dict[str, Any]:
    """Reasoning under both names: vLLM's newer one, and the one of SGLang and older clients."""
    return {"reasoning": reasoning, "reasoning_content": reasoning}


def _deltas(event: Event) -> list[bytes]:
    """The first chunk of a call has its name; the others have pieces of its arguments."""
    match event:
        case Reasoning(text=text):
            delta: dict[str, Any] = _named(text)
        case Content(text=text):
            delta = {"content": text}
        case CallBegin(index=index, id=call_id, name=name):
            begun = {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
            delta = {"tool_calls": [begun]}
        case CallArguments(index=index, text=text):
            delta = {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case CallEnd():
            return []
    return [b'"delta":' + orjson.dumps(delta)]

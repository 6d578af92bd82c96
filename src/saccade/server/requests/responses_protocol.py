"""Request model of OpenAI's Responses API. Items of the input are read by `responses_request`."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from saccade.server.requests.protocol import (
    STRING,
    EngineRequest,
    Int,
    Number,
    ProcessorKwargs,
    ReasoningEffort,
    Renames,
    Texts,
    Tools,
    Values,
    Wire,
    json_object,
)

_PART = {
    "oneOf": [
        json_object("type", "text", type={"enum": ["input_text"]}, text=STRING),
        json_object("type", "image_url", type={"enum": ["input_image"]}, image_url=STRING),
    ]
}
_ITEM = json_object(
    "role",
    "content",
    type={"enum": ["message"]},
    role={"enum": ["user", "assistant", "system", "developer"]},
    content={"oneOf": [STRING, {"type": "array", "items": _PART}]},
)


def _text_or_list(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise PydanticCustomError("input", "must be text or a list of items")
    return value


Input = Annotated[
    Any,
    BeforeValidator(_text_or_list),
    WithJsonSchema({"oneOf": [STRING, {"type": "array", "minItems": 1, "items": _ITEM}]}),
]


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16, fail_fast=True),
]


class TextFormat(Wire):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(Wire):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(Wire):
    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(EngineRequest):
    input: Input
    instructions: str | None = None
    max_output_tokens: Annotated[Int, Field(ge=1)] | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    stream: bool | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: Texts | None = None
    top_logprobs: Int | None = None
    metadata: Metadata | None = None
    user: str | None = None
    store: bool | None = None
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # Extensions, named as in chat completions.
    top_k: Int | None = None
    seed: Int | None = None
    stop: str | Texts | None = None
    ignore_eos: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: ProcessorKwargs | None = None

    # The names of chat completions for what has another name here.
    INSTEAD: ClassVar[Renames] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "structured_outputs": "text.format",
        "guided_json": "text.format",
        "reasoning_effort": "reasoning.effort",
    }
    UNSUPPORTED: ClassVar[Values] = {
        **dict.fromkeys(INSTEAD, (None,)),
        **dict.fromkeys(("guided_regex", "guided_choice", "guided_grammar", "allowed_token_ids"), (None,)),
        "n": (None, 1),
        "min_p": (None, 0),
        "min_tokens": (None, 0),
        "presence_penalty": (None, 0),
        "frequency_penalty": (None, 0),
        "repetition_penalty": (None, 1),
        "logit_bias": (None, {}),
        "stop_token_ids": (None, []),
        "background": (None, False),
        "context_management": (None, []),
        "conversation": (None,),
        "moderation": (None,),
        "prompt": (None,),
    }

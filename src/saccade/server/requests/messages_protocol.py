"""Request models of Anthropic's Messages API. Messages are checked elsewhere: `messages_request` reads their blocks,
and `inputs.text.chat_messages` checks the result."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from saccade.server.requests.protocol import (
    STRING,
    EngineRequest,
    Int,
    Number,
    ProcessorKwargs,
    Renames,
    Texts,
    Tools,
    Values,
    Wire,
    json_object,
)

_SOURCE = {
    "oneOf": [
        json_object("type", "media_type", "data", type={"enum": ["base64"]}, media_type=STRING, data=STRING),
        json_object("type", "url", type={"enum": ["url"]}, url=STRING),
    ]
}
_TEXT_BLOCK = json_object("type", "text", type={"enum": ["text"]}, text=STRING)
_BLOCK = {
    "oneOf": [
        _TEXT_BLOCK,
        json_object("type", "source", type={"enum": ["image"]}, source=_SOURCE),
        json_object("type", "tool_use_id", type={"enum": ["tool_result"]}, tool_use_id=STRING, content=STRING),
    ]
}
_MESSAGE = json_object(
    "role",
    "content",
    role={"enum": ["user", "assistant", "system"]},
    content={"oneOf": [STRING, {"type": "array", "items": _BLOCK}]},
)
BlockMessages = Annotated[list[Any], WithJsonSchema({"type": "array", "minItems": 1, "items": _MESSAGE})]
System = Annotated[Any, WithJsonSchema({"oneOf": [STRING, {"type": "array", "items": _TEXT_BLOCK}]})]


class Thinking(Wire):
    """`budget_tokens` is not enforced: max_tokens bounds reasoning and answer together."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Int | None = None
    display: Literal["summarized", "omitted"] | None = None


class MessagesToolChoice(Wire):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Wire):
    type: Literal["json_schema"]
    schema_: dict[str, Any] | bool = Field(alias="schema")


class OutputConfig(Wire):
    format: OutputFormat | None = None


class CountTokensRequest(Wire):
    """The fields that shape the prompt."""

    model: str | None = None
    messages: BlockMessages
    system: System = None
    tools: Tools | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: ProcessorKwargs | None = None

    # Other names: of OpenAI, and of Anthropic's beta.
    INSTEAD: ClassVar[Renames] = {
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "output_format": "output_config.format",
    }
    UNSUPPORTED: ClassVar[Values] = {
        **dict.fromkeys(INSTEAD, (None,)),
        "container": (None,),
        "mcp_servers": (None, []),
        "n": (None, 1),
    }


class MessagesRequest(CountTokensRequest, EngineRequest):
    max_tokens: Annotated[Int, Field(ge=1)]
    stop_sequences: Texts | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Int | None = None
    stream: bool | None = None
    # Extensions, named as in chat completions.
    seed: Int | None = None
    ignore_eos: bool | None = None

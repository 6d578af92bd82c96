"""Request models. pydantic checks requests only; replies are written by hand (see reply.py).

Unknown fields are ignored, as in every server of this API. Fields that would change the answer but are not supported
are refused (see UNSUPPORTED): ignoring them would give a wrong answer. Messages are not validated here, so that large
images are neither copied nor matched; `inputs.text.chat_messages` checks them.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

MAX_ID_LENGTH = 128
Values = Mapping[str, tuple[Any, ...]]
Renames = Mapping[str, str]


def _whole(value: Any) -> Any:
    """16.0 becomes 16; everything else is left to pydantic's check."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**63 else value


Int = Annotated[int, BeforeValidator(_whole)]
MAX_TOKEN_ID = 2**31 - 1
TokenId = Annotated[int, Field(ge=0, lt=2**31), BeforeValidator(_whole)]
Priority = Annotated[int, Field(ge=-(2**31), lt=2**31), BeforeValidator(_whole)]
Number = Annotated[float, Field(allow_inf_nan=False)]
# Stop at the first wrong item: pydantic would keep an error for each of a million.
Texts = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Tools = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
MAX_BIASES = 4096  # a cheap early check; `request_params` has the real limit


def _few_biases(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise PydanticCustomError("biases", "has too many tokens ({num})", {"num": len(value)})
    return value


Biases = Annotated[dict[str, Number], BeforeValidator(_few_biases)]
Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:-]*$", max_length=MAX_ID_LENGTH)]
STRING = {"type": "string"}


def json_object(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", **({"required": list(required)} if required else {}), "properties": properties}


_IMAGE_URL = json_object("url", url=STRING, detail={"enum": ["auto", "low", "high"]})
_PART = {
    "oneOf": [
        json_object("type", "text", type={"enum": ["text"]}, text=STRING),
        json_object("type", "image_url", type={"enum": ["image_url"]}, image_url=_IMAGE_URL),
    ]
}
_MESSAGE = json_object(
    "role",
    "content",
    role={"enum": ["system", "user", "assistant"]},
    content={"oneOf": [STRING, {"type": "array", "items": _PART}]},
)
Messages = Annotated[list[Any], WithJsonSchema({"type": "array", "minItems": 1, "items": _MESSAGE})]
_WHOLE = {"type": "integer", "minimum": 1}
# Parsed by hand (inputs.sizing), which refuses unknown keys with a reason.
ProcessorKwargs = Annotated[
    dict[str, Any],
    WithJsonSchema(
        json_object(min_pixels=_WHOLE, max_pixels=_WHOLE, size=json_object(shortest_edge=_WHOLE, longest_edge=_WHOLE))
    ),
]
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}}
_TEXTS = {"type": "array", "items": STRING}
_CHUNK = 2**16  # ids checked at once; other threads run in between


def _read_prompt(value: Any) -> Any:
    """Checks by hand: pydantic would try every kind of list, and keep an error for each of a million ids."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _no_prompt()
    kinds = set(map(type, value))
    if kinds == {list}:
        return [_read_ids(ids) for ids in value]
    return value if kinds <= {str} else _read_ids(value)


def _read_ids(ids: list[Any]) -> list[int]:
    read: list[int] = []
    for start in range(0, len(ids), _CHUNK):
        chunk = ids[start : start + _CHUNK]
        if float in set(map(type, chunk)):
            chunk = [*map(_whole, chunk)]
        if set(map(type, chunk)) != {int} or min(chunk) < 0 or max(chunk) > MAX_TOKEN_ID:
            raise _no_prompt()
        read += chunk
    return read


def _no_prompt() -> PydanticCustomError:
    ids = f"token ids (0..{MAX_TOKEN_ID})"
    return PydanticCustomError("prompt", "must be text, {ids}, or a list of either", {"ids": ids})


PromptField = Annotated[
    Any,
    BeforeValidator(_read_prompt),
    WithJsonSchema({"anyOf": [STRING, _TEXTS, _IDS, {"type": "array", "items": _IDS}]}),
]


class Wire(BaseModel):
    """Strict: a string is not a number. JSON has one kind of number, so 16.0 is accepted as 16."""

    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())

    # Fields of other servers that would change the answer, with the values that would not; others are refused.
    UNSUPPORTED: ClassVar[Values] = {}
    # What to send for some of them, which are ignored if that is sent, too.
    INSTEAD: ClassVar[Renames] = {}
    NESTED: ClassVar[Mapping[str, "type[Wire]"]] = {}  # fields that are models


class StreamOptions(Wire):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(Wire):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Wire):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Wire):
    """vLLM's form; one kind at a time."""

    json_: dict[str, Any] | str | bool | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    structural_tag: Any = None


class SamplingFields(Wire):
    """How tokens are sampled and when to stop, under the names that OpenAI, vLLM and SGLang share."""

    n: Int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Int | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    stop: str | Texts | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: Biases | None = None


class EngineRequest(Wire):
    """Fields of all requests that the engine runs."""

    model: str | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    priority: Priority | None = None
    timeout: Annotated[Number, Field(gt=0, le=10**6)] | None = None


class SamplingRequest(EngineRequest, SamplingFields):
    """Fields that chat and text completions share."""

    max_tokens: Int | None = None
    min_tokens: Int | None = None
    seed: Int | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: TokenIds | None = None
    prompt_logprobs: Int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: dict[str, Any] | str | None = None
    disable_any_whitespace: bool | None = None
    request_id: Id | None = None
    rid: Id | None = None
    return_token_ids: bool | None = None
    timings: bool | None = None

    UNSUPPORTED = {
        "bad_words": (None, []),
        "best_of": (None, 1),
        "use_beam_search": (None, False),
        "logits_processors": (None, []),
        "truncate_prompt_tokens": (None,),
        "prompt_embeds": (None,),
        "echo": (None, False),
        "suffix": (None, ""),
        "return_tokens_as_token_ids": (None, False),
        "lora_path": (None, ""),
        "no_stop_trim": (None, False),
        "stop_regex": (None, [], ""),
        "custom_logit_processor": (None, ""),
        "thinking_token_budget": (None,),
        "max_new_tokens": (None,),
        "max_output_tokens": (None,),
        "stop_sequences": (None, []),
    }
    # The names of other APIs for what has another name here.
    INSTEAD = {"max_new_tokens": "max_tokens", "max_output_tokens": "max_tokens", "stop_sequences": "stop"}


# Only "none" has an effect: templates can switch thinking off, not limit it.
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(SamplingRequest):
    messages: Messages
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    mm_processor_kwargs: ProcessorKwargs | None = None
    include_reasoning: bool | None = None

    UNSUPPORTED = {
        **SamplingRequest.UNSUPPORTED,
        "add_special_tokens": (None, False),
        "chat_template": (None,),
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "documents": (None, []),
        "audio": (None,),
        "modalities": (None, [], ["text"]),
        "media_io_kwargs": (None, {}),
        "enable_thinking": (None,),
    }
    INSTEAD = {**SamplingRequest.INSTEAD, "enable_thinking": "chat_template_kwargs.enable_thinking"}

    @property
    def template_variables(self) -> dict[str, Any] | None:
        if self.reasoning_effort != "none":
            return self.chat_template_kwargs
        return {"enable_thinking": False} | (self.chat_template_kwargs or {})


class CompletionRequest(SamplingRequest):
    prompt: PromptField
    logprobs: Int | None = None
    echo: bool | None = None

    UNSUPPORTED = {
        **{name: allowed for name, allowed in SamplingRequest.UNSUPPORTED.items() if name != "echo"},
        "add_special_tokens": (None, True),
    }


class GenerateParams(SamplingFields):
    """SGLang's sampling_params."""

    max_new_tokens: Int | None = None
    min_new_tokens: Int | None = None
    sampling_seed: Int | None = None
    no_stop_trim: bool | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None

    # The names of OpenAI and vLLM for what SGLang calls something else, has in the request, or does not have.
    INSTEAD = {
        "max_tokens": "max_new_tokens",
        "max_completion_tokens": "max_new_tokens",
        "min_tokens": "min_new_tokens",
        "seed": "sampling_seed",
        "include_stop_str_in_output": "no_stop_trim",
        "logprobs": "return_logprob beside sampling_params",
        "top_logprobs": "top_logprobs_num beside sampling_params",
        "prompt_logprobs": "logprob_start_len beside sampling_params",
        "response_format": "json_schema",
        "structured_outputs": "json_schema, regex or ebnf",
        "guided_json": "json_schema",
        "guided_regex": "regex",
        "guided_choice": "regex",
        "guided_grammar": "ebnf",
    }
    UNSUPPORTED = {
        **dict.fromkeys(INSTEAD, (None,)),
        "min_tokens": (None, 0),
        "include_stop_str_in_output": (None, False),
        "logprobs": (None, False),
        "allowed_token_ids": (None,),
        "bad_words": (None, []),
        "stop_regex": (None, [], ""),
        "structural_tag": (None,),
        "custom_params": (None,),
    }


def _not_many(value: Any) -> Any:
    """SGLang takes a list of prompts, too, and then a list in a list of images."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        raise PydanticCustomError("batch", "must be one prompt; send a request for each")
    return value


def _not_many_images(value: Any) -> Any:
    if isinstance(value, list) and value and isinstance(value[0], list):
        raise PydanticCustomError("batch", "must be the images of one prompt; send a request for each prompt")
    return value


class GenerateRequest(Wire):
    """SGLang's native request; one prompt, not a batch."""

    text: Annotated[str | None, BeforeValidator(_not_many)] = None
    input_ids: Annotated[TokenIds | None, BeforeValidator(_not_many)] = None
    image_data: Annotated[str | Texts | None, BeforeValidator(_not_many_images)] = None
    sampling_params: GenerateParams | None = None
    return_logprob: bool | None = None
    logprob_start_len: Int | None = None
    top_logprobs_num: Int | None = None
    stream: bool | None = None
    rid: Id | None = None
    priority: Priority | None = None
    timings: bool | None = None
    return_text_in_logprobs: bool | None = None

    NESTED = {"sampling_params": GenerateParams}
    INSTEAD = {name: f"sampling_params.{name}" for name in GenerateParams.model_fields}
    UNSUPPORTED = {
        **dict.fromkeys(INSTEAD, (None,)),
        "input_embeds": (None,),
        "video_data": (None, []),
        "audio_data": (None, []),
        "lora_path": (None, ""),
        "return_hidden_states": (None, False),
        "token_ids_logprob": (None,),
        "custom_logit_processor": (None, ""),
    }


class TokenizeRequest(Wire):
    """A text, or messages to be written by the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: ProcessorKwargs | None = None
    return_token_strs: bool | None = None

    UNSUPPORTED = {"chat_template": (None,)}


class DetokenizeRequest(Wire):
    model: str | None = None
    tokens: TokenIds


class AbortRequest(Wire):
    rid: str | None = None
    request_id: str | None = None
    abort_all: bool | None = None

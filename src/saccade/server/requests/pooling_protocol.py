"""Requests for vectors and scores: OpenAI's embeddings with vLLM's extensions, vLLM's scores, Jina's and Cohere's
rerank. Fields about sampling are ignored, since nothing is generated."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from saccade.server.requests.protocol import (
    STRING,
    EngineRequest,
    Id,
    Int,
    Messages,
    ProcessorKwargs,
    PromptField,
    Renames,
    Values,
    json_object,
)

_CONTENT = {"anyOf": [STRING, json_object(text=STRING, image=STRING)]}


def _read_items(value: Any) -> Any:
    """Checks for one item or a list of them. The items are checked later, in a worker thread."""
    if isinstance(value, str | dict) or (isinstance(value, list) and all(isinstance(v, str | dict) for v in value)):
        return value
    raise PydanticCustomError("items", "must be text or an object, or a list of these")


Item = Annotated[Any, BeforeValidator(_read_items), WithJsonSchema(_CONTENT)]
Items = Annotated[
    Any,
    BeforeValidator(_read_items),
    WithJsonSchema({"anyOf": [*_CONTENT["anyOf"], {"type": "array", "items": _CONTENT}]}),
]


class PoolingRequest(EngineRequest):
    mm_processor_kwargs: ProcessorKwargs | None = None
    request_id: Id | None = None
    rid: Id | None = None
    timings: bool | None = None

    UNSUPPORTED: ClassVar[Values] = {
        "stream": (None, False),
        "truncate_prompt_tokens": (None, -1),  # to the model's length, beyond which prompts are refused
        "chat_template": (None,),
    }


class EmbeddingRequest(PoolingRequest):
    """`input` with one or more texts, or `messages`, a conversation that gets one embedding."""

    input: PromptField | None = None
    messages: Messages | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int | None = None
    pooling: Literal["last", "mean"] | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # Of vLLM: other bytes in base64, and other names for normalize.
    UNSUPPORTED: ClassVar[Values] = {
        **PoolingRequest.UNSUPPORTED,
        "embed_dtype": (None, "float32"),
        "endianness": (None, "native", "little"),
        "use_activation": (None, True),
    }
    INSTEAD: ClassVar[Renames] = {"use_activation": "normalize"}


# A score is always a probability.
_AS_LOGITS = dict.fromkeys(("use_activation", "activation", "softmax"), (None, True))


class ScoreRequest(PoolingRequest):
    """One text against one or many, or pairs; `queries` and `documents` are aliases."""

    text_1: Items | None = None
    text_2: Items | None = None
    queries: Items | None = None
    documents: Items | None = None
    instruction: str | None = None

    UNSUPPORTED: ClassVar[Values] = {**PoolingRequest.UNSUPPORTED, **_AS_LOGITS}


class RerankRequest(PoolingRequest):
    query: Item
    documents: Items
    top_n: Int | None = None
    return_documents: bool | None = None
    instruction: str | None = None

    UNSUPPORTED: ClassVar[Values] = {
        **PoolingRequest.UNSUPPORTED,
        **_AS_LOGITS,
        "rank_fields": (None, []),
        "max_tokens_per_doc": (None,),
    }

"""GET /openapi.json, generated from the models that check requests."""

from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

from saccade import __version__
from saccade.server.http.auth import ADMIN_PATHS, OPEN_PATHS
from saccade.server.requests.messages_protocol import CountTokensRequest, MessagesRequest
from saccade.server.requests.pooling_protocol import EmbeddingRequest, RerankRequest, ScoreRequest
from saccade.server.requests.protocol import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
    Wire,
    json_object,
)
from saccade.server.requests.responses_protocol import ResponsesRequest
from saccade.wire.trace_records import MAX_TRACE_S

# A red square of 16 x 16 pixels.
PICTURE = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAABAAAAAQCAIAAACQkWg2AAAAGklEQVR42mO8IyfHQApgYiARjGoY1TB0NAAAjEsBOPY5fDQAAAAASUVORK5CYII="
)
_QUESTION = {"type": "text", "text": "What color is this?"}
_ASKED = [{"role": "user", "content": [_QUESTION, {"type": "image_url", "image_url": {"url": PICTURE}}]}]
_SAID: list[dict[str, Any]] = [{"role": "user", "content": "Hello!"}]
_SCORED = {"text_1": "What color is the sky?", "text_2": ["The sky is blue.", "Fish swim."]}
_RANKED = {"query": "What color is the sky?", "documents": ["Fish swim.", "The sky is blue."], "top_n": 1}
# Each with an example, which /docs offers to try.
POSTS: dict[str, tuple[type[Wire], str, dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, "Answer a conversation.", {"messages": _ASKED, "max_tokens": 32}),
    "/v1/chat/completions/render": (ChatRequest, "Show the prompt of a conversation.", {"messages": _SAID}),
    "/v1/completions": (CompletionRequest, "Continue a text.", {"prompt": "Once upon a time", "max_tokens": 16}),
    "/v1/responses": (
        ResponsesRequest,
        "Answer a conversation of items.",
        {"input": "Hello!", "max_output_tokens": 32},
    ),
    "/v1/responses/input_tokens": (
        ResponsesRequest,
        "Count the tokens of a conversation of items.",
        {"input": "Hello!"},
    ),
    "/v1/messages": (
        MessagesRequest,
        "Answer a conversation (Anthropic's API).",
        {"messages": _SAID, "max_tokens": 32},
    ),
    "/v1/messages/count_tokens": (CountTokensRequest, "Count the tokens of a conversation.", {"messages": _SAID}),
    "/v1/embeddings": (
        EmbeddingRequest,
        "Embed texts, or a conversation with images.",
        {"input": ["A red square.", "A blue circle."]},
    ),
    "/v1/score": (ScoreRequest, "Score how well texts match a query.", _SCORED),
    "/score": (ScoreRequest, "The same, at another path.", _SCORED),
    "/v1/rerank": (RerankRequest, "Rank documents by how well they match a query.", _RANKED),
    "/v2/rerank": (RerankRequest, "The same, at Cohere's path.", _RANKED),
    "/rerank": (RerankRequest, "The same, at another path.", _RANKED),
    "/generate": (
        GenerateRequest,
        "Continue a text (SGLang's API).",
        {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 16}},
    ),
    "/tokenize": (TokenizeRequest, "Tokenize a text or a conversation.", {"prompt": "Hello!"}),
    "/detokenize": (DetokenizeRequest, "Turn tokens into text.", {"tokens": [1, 2, 3]}),
    "/abort_request": (AbortRequest, "Abort a request.", {"rid": "the-id-of-a-request"}),
}
GETS = {
    "/v1/models": "The model.",
    "/health": "Whether the server is alive.",
    "/ready": "Whether requests are accepted.",
    "/health_generate": "Whether the engine produces tokens.",
    "/ping": "Whether the server is alive.",
    "/load": "Number of requests in the server.",
    "/metrics": "Metrics for Prometheus.",
    "/version": "The version.",
    "/graphs": "Every graph by phase, and the ranks that share the model.",
    "/live": "What the engine is doing: requests, caches, passes after number `since`, the last minutes.",
    "/server_info": "Limits and state.",
    "/flush_cache": "Empty the prompt and image caches, if no request runs or waits.",
    "/trace": "Record what the engine does in the next seconds, for Perfetto.",
}
# Without a body.
ACTIONS = {
    "/start_profile": "Profile the engine with torch.profiler (--profile-folder).",
    "/stop_profile": "End the profile and return the name of its file.",
}
_SECONDS = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TRACE_S, "default": 5}
_REFS = "#/components/schemas/{model}"
_TEXT_OR_NULL = {"type": ["string", "null"]}
_ERROR_FIELDS: dict[str, Any] = {
    "message": {"type": "string"},
    "type": {"type": "string"},
    "param": _TEXT_OR_NULL,
    "code": _TEXT_OR_NULL,
}
_ERROR = json_object("error", error=json_object(*_ERROR_FIELDS, **_ERROR_FIELDS))


@cache
def build_document() -> dict[str, Any]:
    kinds = sorted({kind for kind, _, _ in POSTS.values()}, key=lambda kind: kind.__name__)
    _, found = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_REFS)
    paths: dict[str, Any] = {}
    for path, (kind, text, example) in POSTS.items():
        schema = {"$ref": _REFS.format(model=kind.__name__)}
        body = {"required": True, "content": {"application/json": {"schema": schema, "example": example}}}
        paths[path] = {"post": {**_operation(path, text), "requestBody": body}}
    paths |= {path: {"get": _operation(path, text)} for path, text in GETS.items()}
    paths |= {path: {"post": _operation(path, text)} for path, text in ACTIONS.items()}
    paths["/trace"]["get"]["parameters"] = [{"name": "seconds", "in": "query", "schema": _SECONDS}]
    paths["/v1/models/{name}"] = {
        "get": {
            **_operation("/v1/models/{name}", "One model."),
            "parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}],
        }
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Saccade", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**found["$defs"], "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(path: str, text: str) -> dict[str, Any]:
    error = {
        "description": "An error.",
        "content": {"application/json": {"schema": {"$ref": _REFS.format(model="Error")}}},
    }
    security: list[dict[str, list[str]]] = [] if path in OPEN_PATHS else [{"key": []}]
    note = " Needs the administrator's key." if path in ADMIN_PATHS else ""
    return {
        "summary": text + note,
        "security": security,
        "responses": {"200": {"description": "Success."}, "default": error},
    }

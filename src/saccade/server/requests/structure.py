"""Reduces all the ways to ask for structured output to one grammar. None of them is ever ignored."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import orjson

from saccade.errors import RequestError
from saccade.server.requests.protocol import GenerateParams, ResponseFormat, SamplingRequest, StructuredOutputs
from saccade.wire.grammar import Grammar, GrammarKind

Wish = tuple[str, GrammarKind, Any]  # a field, the kind of grammar that it asks for, and its value
_KINDS: dict[str, GrammarKind] = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "lark",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "lark",
}


def chosen_grammar(request: SamplingRequest | GenerateParams) -> Grammar | None:
    """The grammar a request asks for; asking in two ways is an error."""
    asked = _asked(request)
    if len(asked) > 1:
        names = " and ".join(name for name, *_ in asked[:2])
        raise RequestError(f"{names} both ask for structure; send only one", param=asked[1][0], code="invalid_value")
    return replace(_grammar(*asked[0]), has_whitespace=_wants_whitespace(request)) if asked else None


def structure_param(request: object) -> str | None:
    asked = _asked(request) if isinstance(request, SamplingRequest | GenerateParams) else []
    return asked[0][0] if asked else None


def _wants_whitespace(request: SamplingRequest | GenerateParams) -> bool:
    """JSON is compact unless `disable_any_whitespace` is false, in structured_outputs or at the top level."""
    inner = getattr(request, "structured_outputs", None)
    wishes = (getattr(where, "disable_any_whitespace", None) for where in (inner, request))
    return next((wish for wish in wishes if wish is not None), True) is False


def _asked(request: SamplingRequest | GenerateParams) -> list[Wish]:
    wishes: list[Wish] = []
    if isinstance(request, SamplingRequest):
        wishes += [*_from_format(request.response_format), *_from_structured(request.structured_outputs)]
    wishes += [(name, kind, getattr(request, name, None)) for name, kind in _KINDS.items()]
    return [wish for wish in wishes if wish[2] is not None]


def _from_format(asked: ResponseFormat | None) -> Iterator[Wish]:
    if asked is None or asked.type == "text":
        return
    if asked.type == "json_object":
        yield "response_format", "json_object", ""
        return
    schema = None if asked.json_schema is None else asked.json_schema.schema_
    if schema is None:
        param = "response_format.json_schema.schema"
        raise RequestError(f"{param} is missing", param=param, code="missing_parameter")
    yield "response_format", "json_schema", schema


def _from_structured(asked: StructuredOutputs | None) -> Iterator[Wish]:
    if asked is None:
        return
    if asked.structural_tag is not None:
        param = "structured_outputs.structural_tag"
        raise RequestError(f"{param} is not supported; use json", param=param, code="unsupported_parameter")
    yield "structured_outputs.json", "json_schema", asked.json_
    yield "structured_outputs.regex", "regex", asked.regex
    yield "structured_outputs.choice", "choice", asked.choice
    yield "structured_outputs.grammar", "lark", asked.grammar
    yield "structured_outputs.json_object", "json_object", "" if asked.json_object else None


def _grammar(name: str, kind: GrammarKind, value: Any) -> Grammar:
    if isinstance(value, str):
        return Grammar(kind, value)
    try:
        return Grammar(kind, orjson.dumps(value).decode())
    except (TypeError, RecursionError):  # orjson's depth limit, or invalid Unicode
        text = f"{name} is nested too deeply or has invalid text"
        raise RequestError(text, param=name, code="invalid_schema") from None

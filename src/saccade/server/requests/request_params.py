"""From a request's fields to sampling parameters."""

import re
from dataclasses import fields as fields_of
from dataclasses import replace
from typing import Any

from saccade.errors import RequestError
from saccade.inputs.text.generation import GenerationDefaults
from saccade.server.requests.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerateParams,
    GenerateRequest,
    SamplingRequest,
)
from saccade.server.requests.structure import chosen_grammar
from saccade.server.server_settings import ServerSettings
from saccade.wire.grammar import Grammar
from saccade.wire.sampling_params import MAX_LOGIT_BIAS, SamplingParams

_NAMES = frozenset(field.name for field in fields_of(SamplingParams))
_SUGGESTED = tuple(field.name for field in fields_of(GenerationDefaults) if field.name != "eos_token_ids")
COMPLETION_TOKENS, GENERATE_TOKENS = 16, 128
_GENERATE_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "prompt_logprobs_start": "logprob_start_len",
}
_LENGTHS = ("max_tokens", "min_tokens")  # an error about one may name the other

Defaults = GenerationDefaults | None  # what the checkpoint suggests
_LEAST_TOP_P = 1e-6


def usable_defaults(defaults: GenerationDefaults) -> tuple[GenerationDefaults, list[str]]:
    """The defaults without values that no request may have, and why each of these is left out."""
    if defaults.top_p == 0:  # as in transformers: only the likeliest token is left
        defaults = replace(defaults, top_p=_LEAST_TOP_P)
    reasons: list[str] = []
    unused: dict[str, Any] = {}
    for name in _SUGGESTED:
        if (value := getattr(defaults, name)) is None:
            continue
        try:
            SamplingParams(**{name: value})
        except RequestError as error:
            reasons.append(str(error))
            unused[name] = None
    return replace(defaults, **unused), reasons


def chat_params(
    request: ChatRequest, settings: ServerSettings, defaults: Defaults, calls: Grammar | None = None
) -> SamplingParams:
    """`calls` is the grammar of forced tool calls."""
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")
    longest = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    fields = _common(request, settings, defaults)
    if calls is not None:
        if "grammar" in fields:
            raise RequestError("a forced tool call leaves no room for other structured output", param="tool_choice")
        fields["grammar"] = calls
    fields["max_tokens"] = longest
    _check_empty(request, longest, "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens")
    fields["logprobs"] = _logprobs("top_logprobs", (request.top_logprobs or 0) if request.logprobs else None, settings)
    return _checked(fields, {} if request.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"})


def completion_params(request: CompletionRequest, settings: ServerSettings, defaults: Defaults) -> SamplingParams:
    """With `echo`, zero tokens are allowed: evaluations score a text that way."""
    fields = _common(request, settings, defaults)
    fields["max_tokens"] = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    _check_empty(request, fields["max_tokens"], "max_tokens", is_scored=bool(request.echo))
    fields["logprobs"] = _logprobs("logprobs", request.logprobs, settings)
    if request.echo and request.logprobs is not None:
        fields["prompt_logprobs"] = max(request.logprobs, fields.get("prompt_logprobs") or 0)
    return SamplingParams(**fields)


def generate_params(request: GenerateRequest, settings: ServerSettings, defaults: Defaults) -> SamplingParams:
    params = request.sampling_params or GenerateParams()
    fields = _common(params, settings, defaults)
    own = {
        "min_tokens": params.min_new_tokens,
        "seed": params.sampling_seed,
        "include_stop_str_in_output": params.no_stop_trim,
    }
    fields |= {name: value for name, value in own.items() if value is not None}
    fields["max_tokens"] = GENERATE_TOKENS if params.max_new_tokens is None else params.max_new_tokens
    if request.return_logprob:
        fields["logprobs"] = _logprobs("top_logprobs_num", request.top_logprobs_num or 0, settings)
        if (start := request.logprob_start_len) is not None and start != -1:
            fields["prompt_logprobs"], fields["prompt_logprobs_start"] = fields["logprobs"], max(start, 0)
    return _checked(fields, _GENERATE_NAMES)


def _common(request: SamplingRequest | GenerateParams, settings: ServerSettings, defaults: Defaults) -> dict[str, Any]:
    """The request's values; if unset the checkpoint's, else none, so that the defaults of `SamplingParams` apply."""
    values: dict[str, Any] = {name: getattr(request, name) for name in request.model_fields_set & _NAMES}
    if defaults is not None:
        values |= {name: getattr(defaults, name) for name in _SUGGESTED if values.get(name) is None}
    values["n"] = _count(request.n, settings)
    values["stop"] = _stop(request.stop, settings)
    values["logit_bias"] = _biases(request.logit_bias)
    if isinstance(request, SamplingRequest):
        values["prompt_logprobs"] = _logprobs("prompt_logprobs", request.prompt_logprobs, settings)
    values["grammar"] = chosen_grammar(request)
    if isinstance(request, SamplingRequest) and request.stream and request.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs", code="invalid_value")
    return {name: value for name, value in values.items() if value is not None}


def _check_empty(request: SamplingRequest, longest: int | None, name: str, *, is_scored: bool = False) -> None:
    """Zero tokens make sense only to score the prompt; otherwise they are a mistake."""
    if longest == 0 and not is_scored and request.prompt_logprobs is None:
        text = f"{name} is 0; it must be at least 1 unless prompt_logprobs is set"
        raise RequestError(text, param=name, code="invalid_value")


def _count(n: int | None, settings: ServerSettings) -> int:
    if n is not None and not 1 <= n <= settings.max_n:
        raise RequestError(f"n: allowed are 1..{settings.max_n} (--max-n)", param="n", code="invalid_value")
    return 1 if n is None else n


def _stop(stop: str | list[str] | None, settings: ServerSettings) -> str | list[str] | None:
    if isinstance(stop, list) and len(stop) > settings.max_stop_strings:
        text = f"stop has {len(stop)} strings; the limit is {settings.max_stop_strings} (--max-stop-strings)"
        raise RequestError(text, param="stop", code="invalid_value")
    return stop


def _checked(fields: dict[str, Any], names: dict[str, str]) -> SamplingParams:
    """Raises errors with the request's names of fields."""
    try:
        return SamplingParams(**fields)
    except RequestError as error:
        param = error.param or ""
        if param not in names and param not in _LENGTHS:  # other errors may quote the client's own words
            raise
        message = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), str(error))
        raise RequestError(message, param=names.get(param, param), code=error.code) from None


def _logprobs(name: str, count: int | None, settings: ServerSettings) -> int | None:
    if count is not None and not 0 <= count <= settings.max_logprobs:
        raise RequestError(f"{name}: allowed are 0..{settings.max_logprobs} (--max-logprobs)", param=name)
    return count


def _biases(biases: dict[str, float] | None) -> dict[int, float] | None:
    if biases is None:
        return None
    if len(biases) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias has more than {MAX_LOGIT_BIAS} tokens, which is the limit", param="logit_bias")
    if not all(key.isascii() and key.isdigit() and len(key) < 11 for key in biases):
        raise RequestError("logit_bias must map token ids to numbers", param="logit_bias")
    return {int(key): value for key, value in biases.items()}

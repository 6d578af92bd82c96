"""From request fields to sampling: what is accepted, refused, or supplied by the checkpoint."""

import math
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.errors import ConfigError, RequestError
from saccade.inputs.text.generation import GenerationDefaults
from saccade.server.requests.messages_protocol import MessagesRequest
from saccade.server.requests.pooling_protocol import EmbeddingRequest, RerankRequest, ScoreRequest
from saccade.server.requests.protocol import ChatRequest, CompletionRequest, GenerateRequest, Wire
from saccade.server.requests.reading import ignored_header, read_request
from saccade.server.requests.request_params import (
    chat_params,
    completion_params,
    generate_params,
    usable_defaults,
)
from saccade.server.requests.responses_protocol import ResponsesRequest
from saccade.server.requests.structure import chosen_grammar
from saccade.server.server_settings import ServerSettings
from saccade.wire.grammar import Grammar
from saccade.wire.sampling_params import SamplingParams

SETTINGS = ServerSettings(max_n=4, max_logprobs=5)
DEFAULTS = GenerationDefaults(eos_token_ids=frozenset(), temperature=0.3, top_k=9)
HELLO: list[Any] = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> SamplingParams:
    request, _ = read_request(ChatRequest, orjson.dumps({"messages": HELLO, **fields}))
    return chat_params(request, SETTINGS, DEFAULTS)


def test_the_checkpoint_supplies_defaults() -> None:
    assert (chat().temperature, chat().top_k, chat().top_p) == (0.3, 9, 1.0)
    assert chat(temperature=0, top_k=-1).temperature == 0 and chat(top_k=-1).top_k == 0
    request, _ = read_request(ChatRequest, orjson.dumps({"messages": HELLO}))
    assert chat_params(request, SETTINGS, None) == SamplingParams(max_tokens=None)


def test_defaults_that_turn_a_rule_off_or_all_the_way_up_keep_their_meaning() -> None:
    odd = GenerationDefaults(eos_token_ids=frozenset(), temperature=0, top_p=0, top_k=-1)
    usable, reasons = usable_defaults(odd)
    request, _ = read_request(ChatRequest, orjson.dumps({"messages": HELLO}))
    found = chat_params(request, SETTINGS, usable)
    assert not reasons and (found.temperature, found.top_k) == (0, 0)
    assert 0 < found.top_p < 1e-3, "as in transformers, only the likeliest token is left"


def test_request_fields_become_sampling_params() -> None:
    found = chat(
        n=2, seed=-5, stop="x", stop_token_ids=[3], ignore_eos=True, min_tokens=1, logit_bias={"5": -3}, max_tokens=9,
        presence_penalty=1, frequency_penalty=-1, repetition_penalty=1.5, min_p=0.1, top_p=0.5, logprobs=True,
        top_logprobs=3, prompt_logprobs=2, allowed_token_ids=[5], skip_special_tokens=False,
        include_stop_str_in_output=True,
    )  # fmt: skip
    assert found == SamplingParams(
        n=2, seed=-5, stop=("x",), stop_token_ids=(3,), ignore_eos=True, min_tokens=1, logit_bias={5: -3.0},
        max_tokens=9, presence_penalty=1, frequency_penalty=-1, repetition_penalty=1.5, min_p=0.1, top_p=0.5,
        logprobs=3, prompt_logprobs=2, allowed_token_ids=(5,), skip_special_tokens=False,
        include_stop_str_in_output=True, temperature=0.3, top_k=9,
    )  # fmt: skip


def test_errors_about_lengths_name_the_fields_that_were_sent() -> None:
    def generate(**fields: Any) -> SamplingParams:
        body = orjson.dumps({"text": "a", "sampling_params": fields})
        return generate_params(read_request(GenerateRequest, body)[0], SETTINGS, DEFAULTS)

    for ask, least, most in (
        (chat, "min_tokens", "max_tokens"),
        (chat, "min_tokens", "max_completion_tokens"),
        (generate, "min_new_tokens", "max_new_tokens"),
    ):
        with pytest.raises(RequestError, match=rf"^{least} is 9; the most is {most}, here 5$") as refused:
            ask(**{least: 9, most: 5})
        assert refused.value.param == least
    with pytest.raises(RequestError, match=r"^stop is 'max_tokens\\n.*; allowed are strings"):
        chat(stop="max_tokens\n" * 200, max_completion_tokens=3)


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert chat(max_tokens=5).max_tokens == 5 and chat().max_tokens is None
    assert chat(max_tokens=16.0).max_tokens == 16, "JSON has one kind of number"


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 5}, {"n": 0}, {"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 6}, {"temperature": "1"},
        {"temperature": True}, {"max_tokens": 1.5}, {"seed": 2**63}, {"stop": [""]}, {"stop": 5},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {"1": "a"}}, {"stream": True, "prompt_logprobs": 1}, {"stream": 1}, {"cache_salt": ""},
        {"request_id": "a b"}, {"request_id": "x" * 300}, {"priority": 2**40}, {"timeout": 0}, {"response_format": {}},
        {"response_format": {"type": "json_schema"}}, {"response_format": {"type": "xml"}}, {"tools": "x"},
        {"structured_outputs": {"structural_tag": {}}}, {"guided_choice": "x"}, {"messages": "x"}, {"messages": None},
        {"truncate_prompt_tokens": 5}, {"use_beam_search": True}, {"functions": [{}]}, {"echo": True}, {"best_of": 3},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_fields_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        chat(**wrong)
    names = [name.split(".")[0] for name in wrong] + ["prompt_logprobs"]
    assert refused.value.param is not None and refused.value.param.split(".")[0].split("[")[0] in names
    assert str(refused.value)


@pytest.mark.parametrize(
    ("name", "value", "harmless"),
    [
        ("return_tokens_as_token_ids", True, False), ("lora_path", "mine", ""), ("no_stop_trim", True, False),
        ("stop_regex", "a+", []), ("custom_logit_processor", "code", None), ("thinking_token_budget", 9, None),
    ],
)  # fmt: skip
def test_extensions_that_would_change_the_answer_are_refused(name: str, value: Any, harmless: Any) -> None:
    for kind, base in ((ChatRequest, {"messages": HELLO}), (CompletionRequest, {"prompt": "a"})):
        read_request(kind, orjson.dumps({**base, name: harmless}))
        with pytest.raises(RequestError) as refused:
            read_request(kind, orjson.dumps({**base, name: value}))
        assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("kind", "name", "value", "instead"),
    [
        (ChatRequest, "max_new_tokens", 5, "max_tokens"),
        (ChatRequest, "max_output_tokens", 5, "max_tokens"),
        (ChatRequest, "stop_sequences", ["a"], "stop"),
        (ChatRequest, "enable_thinking", False, "chat_template_kwargs.enable_thinking"),
        (ChatRequest, "modalities", ["text", "audio"], None),
        (CompletionRequest, "max_new_tokens", 5, "max_tokens"),
        (GenerateRequest, "temperature", 0, "sampling_params.temperature"),
        (GenerateRequest, "max_new_tokens", 5, "sampling_params.max_new_tokens"),
        (ResponsesRequest, "max_tokens", 5, "max_output_tokens"),
        (ResponsesRequest, "response_format", {"type": "json_object"}, "text.format"),
        (ResponsesRequest, "guided_regex", "a", None),
        (ResponsesRequest, "n", 2, None),
        (ResponsesRequest, "repetition_penalty", 1.1, None),
        (MessagesRequest, "stop", ["a"], "stop_sequences"),
        (MessagesRequest, "output_format", {"type": "json_schema"}, "output_config.format"),
        (EmbeddingRequest, "embed_dtype", "float16", None),
        (EmbeddingRequest, "endianness", "big", None),
        (EmbeddingRequest, "use_activation", False, "normalize"),
        (ScoreRequest, "use_activation", False, None),
        (RerankRequest, "softmax", False, None),
    ],
)
def test_names_of_other_apis_are_refused_where_ignoring_them_would_change_the_answer(
    kind: type[Wire], name: str, value: Any, instead: str | None
) -> None:
    known: dict[str, Any] = {"messages": HELLO, "prompt": "a", "input": "a", "query": "a", "documents": ["a"]}
    base = {field: known[field] for field in known if field in kind.model_fields}
    base |= {"max_tokens": 9} if kind is MessagesRequest else {}
    read_request(kind, orjson.dumps(base | {name: None}))
    with pytest.raises(RequestError) as refused:
        read_request(kind, orjson.dumps(base | {name: value}))
    hint = "leave it out" if instead is None else f"use {instead}"
    assert str(refused.value) == f"{name} is not supported; {hint}" and refused.value.param == name


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (CompletionRequest, {"prompt": "a", "max_new_tokens": 5, "max_tokens": 5}),
        (ChatRequest, {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": False}}),
        (GenerateRequest, {"text": "a", "temperature": 0, "sampling_params": {"temperature": 0, "max_new_tokens": 5}}),
        (ResponsesRequest, {"input": "a", "reasoning_effort": "low", "reasoning": {"effort": "low"}}),
    ],
)
def test_names_of_other_apis_are_ignored_beside_this_ones(kind: type[Wire], fields: dict[str, Any]) -> None:
    base = {"messages": HELLO} if kind is ChatRequest else {}
    found, _ = read_request(kind, orjson.dumps(base | fields))
    assert found == kind.model_validate(base | fields)
    _, *_, own = fields
    with pytest.raises(RequestError, match="is not supported; use"):
        read_request(kind, orjson.dumps(base | fields | {own: None}))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": ["a", "b"]}, "text"),
        ({"input_ids": [[5], [6]]}, "input_ids"),
        ({"text": "a", "image_data": [["aa"], ["bb"]]}, "image_data"),
    ],
)
def test_a_batch_of_sglang_is_refused_as_one(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError, match="one prompt; send a request for each") as refused:
        read_request(GenerateRequest, orjson.dumps(fields))
    assert refused.value.param == param


def test_prompts_may_be_cut_to_a_length_that_no_prompt_exceeds() -> None:
    """`vllm bench serve` says so for embeddings."""
    for kind, base in ((EmbeddingRequest, {"input": "a"}), (RerankRequest, {"query": "a", "documents": ["b"]})):
        read_request(kind, orjson.dumps(base | {"truncate_prompt_tokens": -1}))


@pytest.mark.parametrize("kind", ["xml", "regex", "structural_tag"])
def test_an_error_about_a_format_names_only_formats_that_are_supported(kind: str) -> None:
    with pytest.raises(RequestError, match=r"it should be 'text', 'json_object' or 'json_schema'$") as refused:
        chat(response_format={"type": kind})
    assert refused.value.param == "response_format.type"


def test_special_tokens_are_added_to_plain_text_only() -> None:
    """Clients may say so, but not the opposite."""
    for kind, base, is_added in ((ChatRequest, {"messages": HELLO}, False), (CompletionRequest, {"prompt": "a"}, True)):
        read_request(kind, orjson.dumps({**base, "add_special_tokens": is_added}))
        with pytest.raises(RequestError, match="add_special_tokens is not supported"):
            read_request(kind, orjson.dumps({**base, "add_special_tokens": not is_added}))


NUMERIC = [
    "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "max_tokens", "min_tokens", "seed", "prompt_logprobs", "priority", "timeout",
]  # fmt: skip


@given(name=st.sampled_from(NUMERIC), value=st.one_of(st.floats(), st.integers(), st.just(10**400)))
def test_any_number_is_finite_and_in_range_or_refused(name: str, value: float) -> None:
    request_fields = {"messages": HELLO, name: value}
    try:
        found = chat_params(ChatRequest.model_validate(request_fields), SETTINGS, DEFAULTS)
    except (RequestError, ValueError):
        return
    assert math.isfinite(getattr(found, name, 0) or 0)


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "string"}}}},
            Grammar("json_schema", '{"type":"string"}'),
        ),
        ({"structured_outputs": {"json": {"type": "string"}}}, Grammar("json_schema", '{"type":"string"}')),
        ({"structured_outputs": {"json": '{"type": "string"}'}}, Grammar("json_schema", '{"type": "string"}')),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar("choice", '["a","b"]')),
        ({"structured_outputs": {"grammar": "start: A"}}, Grammar("lark", "start: A")),
        ({"guided_json": {"type": "string"}}, Grammar("json_schema", '{"type":"string"}')),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"guided_choice": ["a"]}, Grammar("choice", '["a"]')),
        ({"guided_grammar": "start: A"}, Grammar("lark", "start: A")),
        ({"regex": "a+"}, Grammar("regex", "a+")),
        ({"ebnf": "start: A"}, Grammar("lark", "start: A")),
        ({"structured_outputs": {"json": "{}", "disable_any_whitespace": True}}, Grammar("json_schema", "{}")),
        ({"structured_outputs": {"json": "{}", "disable_any_whitespace": False}}, Grammar("json_schema", "{}", True)),
        (
            {"structured_outputs": {"json_object": True}, "disable_any_whitespace": False},
            Grammar("json_object", "", True),
        ),
        ({"guided_json": "{}", "disable_any_whitespace": False}, Grammar("json_schema", "{}", True)),
        ({"guided_json": "{}", "disable_any_whitespace": True}, Grammar("json_schema", "{}")),
        ({"response_format": {"type": "json_object"}, "disable_any_whitespace": None}, Grammar("json_object")),
    ],
    ids=lambda value: str(value)[:60],
)
def test_every_way_to_ask_for_structure_gives_its_grammar(fields: dict[str, Any], grammar: Grammar | None) -> None:
    request, ignored = read_request(ChatRequest, orjson.dumps({"messages": HELLO, **fields}))
    assert chosen_grammar(request) == grammar and not ignored


def test_completions_have_their_own_defaults() -> None:
    def params(**fields: Any) -> SamplingParams:
        return completion_params(
            read_request(CompletionRequest, orjson.dumps({"prompt": "a", **fields}))[0], SETTINGS, DEFAULTS
        )

    assert params().max_tokens == 16 and params(max_tokens=3).max_tokens == 3
    scored = params(echo=True, max_tokens=0, logprobs=2)
    assert (scored.max_tokens, scored.logprobs, scored.prompt_logprobs) == (0, 2, 2)
    assert params(prompt_logprobs=1, max_tokens=0).max_tokens == 0
    with pytest.raises(RequestError, match="max_tokens is 0; it must be at least 1 unless prompt_logprobs is set"):
        params(max_tokens=0)
    for prompt in ([1, -1], [2**31], [[1], ["a"]], 5, None, [1.5], {"a": 1}):
        with pytest.raises(RequestError):
            params(prompt=prompt)


def test_sglang_names_are_understood() -> None:
    body = {
        "text": "a",
        "return_logprob": True,
        "top_logprobs_num": 2,
        "logprob_start_len": 5,
        "sampling_params": {"max_new_tokens": 4, "min_new_tokens": 1, "sampling_seed": 3, "stop": "x", "regex": "a"},
    }
    found = generate_params(read_request(GenerateRequest, orjson.dumps(body))[0], SETTINGS, DEFAULTS)
    assert (found.max_tokens, found.min_tokens, found.seed, found.stop) == (4, 1, 3, ("x",))
    assert (found.logprobs, found.prompt_logprobs, found.grammar) == (2, 2, Grammar("regex", "a"))
    assert found.prompt_logprobs_start == 5, "earlier tokens may come from the prefix cache"
    with pytest.raises(RequestError, match="logprob_start_len is 2147483648"):
        too_far = orjson.dumps(body | {"logprob_start_len": 2**31})
        generate_params(read_request(GenerateRequest, too_far)[0], SETTINGS, DEFAULTS)


def test_unknown_fields_are_named_safely() -> None:
    _, ignored = read_request(ChatRequest, orjson.dumps({"messages": HELLO, "user": "x", "a\r\nb": 1, "é": 2}))
    assert ignored_header(ignored) == (b"x-ignored-fields", b"user")


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": -1}, {"metrics_style": "x"}, {"ssl_keyfile": "a"}, {"api_key": ("",)}, {"root_path": "x"},
        {"allowed_origins": "[1]"}, {"allowed_origins": "["}, {"max_n": 0}, {"shutdown_timeout_s": -1.0},
        {"request_timeout_s": float("nan")}, {"generation_config": "x"}, {"ssl_keyfile": "/no", "ssl_certfile": "/no"},
    ],
    ids=str,
)  # fmt: skip
def test_errors_about_settings_name_a_flag(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        ServerSettings(**wrong)
    assert "--" in str(refused.value)


def test_only_loopback_hosts_are_local() -> None:
    local = {
        host: ServerSettings(host=host).is_local for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "10.1.1.1")
    }
    assert [host for host, is_local in local.items() if is_local] == ["127.0.0.1", "localhost", "::1"]

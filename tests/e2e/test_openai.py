"""The real OpenAI client against a real server: every feature of the API."""

import json
from typing import Any

import httpx2
import openai
import pytest

from tests.e2e.pictures import asked, data_url, encoded, image_part, picture

HELLO: list[Any] = [{"role": "user", "content": "hello there"}]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_completion_tokens": 8}
NO_END = {"ignore_eos": True}


def test_a_chat_answer_has_text_usage_and_an_id(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(messages=HELLO, **GREEDY, extra_body=NO_END)
    assert reply.id.startswith("chatcmpl-") and reply.object == "chat.completion" and reply.model == "tiny"
    [choice] = reply.choices
    assert choice.finish_reason == "length" and choice.message.role == "assistant" and choice.message.content
    assert reply.usage is not None and reply.usage.completion_tokens == 8
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 8


def test_a_stream_gives_the_plain_answer_in_pieces(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(messages=HELLO, **GREEDY, extra_body=NO_END)
    options: Any = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(messages=HELLO, **GREEDY, stream=True, stream_options=options, extra_body=NO_END)
    )
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == plain.choices[0].message.content
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert ends[-1] == "length" and not any(ends[:-1])
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert not chunks[-1].choices and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8


def test_usage_can_come_with_every_chunk(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.chat.completions.create(messages=HELLO, **GREEDY, stream=True, stream_options=options, extra_body=NO_END)
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert len(counts) == len(chunks) and counts == sorted(counts) and counts[-1] == 8


def test_log_probabilities_come_with_bytes_and_alternatives(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(messages=HELLO, **GREEDY, logprobs=True, top_logprobs=3, extra_body=NO_END)
    scores = reply.choices[0].logprobs
    assert scores is not None and scores.content is not None and len(scores.content) == 8
    for entry in scores.content:
        assert bytes(entry.bytes or ()).decode() == entry.token and len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token, "the greedy token is the likeliest"
        values = [other.logprob for other in entry.top_logprobs]
        assert values == sorted(values, reverse=True) and entry.logprob == values[0] <= 0
    streamed = client.chat.completions.create(
        messages=HELLO, **GREEDY, logprobs=True, top_logprobs=3, stream=True, extra_body=NO_END
    )
    found = [entry for chunk in streamed for entry in (chunk.choices[0].logprobs or no_scores()).content or ()]
    assert [entry.token for entry in found] == [entry.token for entry in scores.content]


def no_scores() -> Any:
    return openai.types.chat.chat_completion_chunk.ChoiceLogprobs(content=[])


def test_several_outputs_differ_and_a_seed_repeats_them(client: openai.OpenAI) -> None:
    def ask() -> list[str | None]:
        reply = client.chat.completions.create(
            model="tiny", messages=HELLO, n=3, seed=11, temperature=1.5, max_tokens=12, extra_body=NO_END
        )
        assert [choice.index for choice in reply.choices] == [0, 1, 2]
        return [choice.message.content for choice in reply.choices]

    first = ask()
    assert len(set(first)) == 3 and ask() == first


def test_a_stop_string_ends_the_text_before_itself(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=HELLO, **GREEDY, extra_body=NO_END).choices[0].message.content
    assert whole
    stop = whole[4:6]
    for is_streamed in (False, True):
        reply: Any = client.chat.completions.create(
            messages=HELLO, **GREEDY, stop=[stop], stream=is_streamed, extra_body=NO_END
        )
        if is_streamed:
            chunks = list(reply)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            reason = chunks[-1].choices[0].finish_reason
        else:
            text, reason = reply.choices[0].message.content, reply.choices[0].finish_reason
        assert text == whole[: whole.index(stop)] and reason == "stop"


def test_biases_penalties_and_allowed_tokens_shape_the_text(client: openai.OpenAI, http: httpx2.Client) -> None:
    [a] = http.post("/tokenize", json={"prompt": "a"}).json()["tokens"]
    [b] = http.post("/tokenize", json={"prompt": "b"}).json()["tokens"]
    biased = client.chat.completions.create(messages=HELLO, **GREEDY, logit_bias={str(a): 100}, extra_body=NO_END)
    assert biased.choices[0].message.content == "a" * 8
    allowed = client.chat.completions.create(
        messages=HELLO, **GREEDY, extra_body={"allowed_token_ids": [a, b], **NO_END}
    )
    assert set(allowed.choices[0].message.content or "") <= {"a", "b"}
    punished = client.chat.completions.create(
        messages=HELLO,
        **GREEDY,
        frequency_penalty=2,
        presence_penalty=2,
        extra_body={"allowed_token_ids": [a, b], "repetition_penalty": 50.0, **NO_END},
    )
    assert set(punished.choices[0].message.content or "") == {"a", "b"}, "both must come when repeats are punished"


def test_an_image_changes_the_answer_and_is_counted(client: openai.OpenAI) -> None:
    replies = [
        client.chat.completions.create(messages=asked(image_part(encoded(picture(seed)))), **GREEDY, extra_body=NO_END)
        for seed in (1, 2, 1)
    ]
    texts = [reply.choices[0].message.content for reply in replies]
    assert texts[0] == texts[2] and texts[0] != texts[1]
    usage = replies[0].usage
    assert usage is not None and usage.prompt_tokens_details is not None
    rows = usage.prompt_tokens_details.model_dump()["image_tokens"]
    assert rows > 0 and usage.prompt_tokens > rows


def test_two_images_keep_their_order_and_bare_urls_are_taken(client: openai.OpenAI) -> None:
    first, second = (encoded(picture(seed)) for seed in (3, 4))

    def ask(*parts: Any) -> str | None:
        reply = client.chat.completions.create(messages=asked(*parts), **GREEDY, extra_body=NO_END)
        text: str | None = reply.choices[0].message.content
        return text

    there = ask(image_part(first), image_part(second))
    assert there != ask(image_part(second), image_part(first))
    bare = [{"type": "image_url", "image_url": data_url(data)} for data in (first, second)]
    assert ask(*bare) == there
    assert ask(*({"image_url": {"url": data_url(data), "detail": "low"}} for data in (first, second))) == there


@pytest.mark.parametrize("stream", [False, True])
def test_json_schemas_are_obeyed(client: openai.OpenAI, stream: bool) -> None:
    schema: Any = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
        "additionalProperties": False,
    }
    reply: Any = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        temperature=1,
        seed=3,
        max_tokens=200,
        stream=stream,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
    )
    text = (
        "".join(chunk.choices[0].delta.content or "" for chunk in reply) if stream else reply.choices[0].message.content
    )
    found = json.loads(text)
    assert found["n"] in (1, 2) and isinstance(found["ok"], bool) and len(found) == 2


@pytest.mark.parametrize(
    "wish",
    [
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"guided_choice": ["yes", "no"]},
        {"structured_outputs": {"regex": "(yes|no)"}},
        {"guided_regex": "yes|no"},
        {"regex": "yes|no"},
        {"ebnf": 'start: "yes" | "no"'},
    ],
)
def test_every_name_of_structured_output_is_obeyed(client: openai.OpenAI, wish: dict[str, Any]) -> None:
    reply = client.chat.completions.create(
        model="tiny", messages=HELLO, temperature=1.2, max_tokens=20, extra_body=wish
    )
    assert reply.choices[0].message.content in ("yes", "no")


def test_two_wishes_for_structure_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny", messages=HELLO, extra_body={"regex": "a", "guided_choice": ["b"]})
    assert refused.value.param in ("regex", "guided_choice")


def test_text_completions_take_texts_and_token_ids(client: openai.OpenAI, http: httpx2.Client) -> None:
    prompts = ["the fox", "a dog"]
    ids = [http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in prompts]
    options: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 6, "extra_body": NO_END}
    by_text = client.completions.create(prompt=prompts, **options)
    by_ids = client.completions.create(prompt=ids, **options)
    alone = [client.completions.create(prompt=prompt, **options).choices[0].text for prompt in (prompts[0], ids[1])]
    assert by_text.object == "text_completion" and len(by_text.choices) == 2
    assert [choice.text for choice in by_text.choices] == [choice.text for choice in by_ids.choices] == alone
    several = client.completions.create(prompt=prompts, n=2, seed=1, **{**options, "temperature": 1})
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]


def test_a_streamed_text_completion_equals_the_plain_one(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 6, "extra_body": NO_END}
    plain = client.completions.create(prompt=["the fox", "a dog"], **options)
    texts = {0: "", 1: ""}
    usage = None
    for chunk in client.completions.create(
        prompt=["the fox", "a dog"], stream=True, stream_options={"include_usage": True}, **options
    ):
        assert chunk.object == "text_completion"
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [texts[choice.index] for choice in plain.choices] == [choice.text for choice in plain.choices]
    assert usage is not None and usage.completion_tokens == 12


def test_echo_with_log_probabilities_scores_the_prompt(client: openai.OpenAI, http: httpx2.Client) -> None:
    prompt = "the fox"
    tokens = http.post("/tokenize", json={"prompt": prompt}).json()["tokens"]
    for most in (0, 2):
        reply = client.completions.create(
            model="tiny", prompt=prompt, echo=True, logprobs=1, max_tokens=most, temperature=0, extra_body=NO_END
        )
        [choice] = reply.choices
        scores: Any = choice.logprobs
        assert scores is not None and scores.tokens is not None and scores.token_logprobs is not None
        assert len(scores.tokens) == len(tokens) + most and choice.text.startswith(prompt)
        assert "".join(scores.tokens) == choice.text
        assert scores.token_logprobs[0] is None and all(value <= 0 for value in scores.token_logprobs[1:])
        assert scores.top_logprobs is not None and scores.text_offset is not None
        assert scores.text_offset[1] == len(scores.tokens[0])
        assert reply.usage is not None and reply.usage.completion_tokens == most


def test_prompt_log_probabilities_of_a_chat(http: httpx2.Client) -> None:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 1, "prompt_logprobs": 2, "return_token_ids": True}
    reply = http.post("/v1/chat/completions", json=body).json()
    assert len(reply["prompt_logprobs"]) == len(reply["prompt_token_ids"]) == reply["usage"]["prompt_tokens"]
    assert reply["prompt_logprobs"][0] is None and len(reply["choices"][0]["token_ids"]) == 1
    for token, scores in zip(reply["prompt_token_ids"][1:], reply["prompt_logprobs"][1:], strict=True):
        assert scores[str(token)]["logprob"] <= 0 and len(scores) in (2, 3)


def test_errors_reach_the_client_as_its_own_kinds(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=1000)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 5000}])
    assert long.value.code == "context_length_exceeded"


def test_models_are_listed(client: openai.OpenAI) -> None:
    [card] = client.models.list().data
    assert card.id == "tiny" and card.model_dump()["max_model_len"] == 512
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "pick",
        "parameters": {
            "type": "object",
            "properties": {"n": {"enum": [1, 2]}},
            "required": ["n"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "pick"}}])
def test_a_forced_call_is_a_tool_call(client: openai.OpenAI, choice: Any) -> None:
    asked: dict[str, Any] = {
        "model": "tiny", "messages": HELLO, "tools": [TOOL], "tool_choice": choice, "max_tokens": 200, "seed": 1,
        "temperature": 1, "parallel_tool_calls": False,
    }  # fmt: skip
    reply = client.chat.completions.create(**asked)
    assert reply.choices[0].finish_reason == "tool_calls" and not reply.choices[0].message.content
    calls: Any = reply.choices[0].message.tool_calls
    [call] = calls
    assert call.function.name == "pick" and json.loads(call.function.arguments)["n"] in (1, 2)
    name, arguments = "", ""
    for chunk in client.chat.completions.create(**asked, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or ():
            name, arguments = name + (piece.function.name or ""), arguments + (piece.function.arguments or "")
    assert name == "pick" and arguments == call.function.arguments


def test_results_of_tools_go_back_into_the_conversation(client: openai.OpenAI) -> None:
    call: Any = {"id": "call_1", "type": "function", "function": {"name": "pick", "arguments": '{"n": 1}'}}
    messages: list[Any] = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ]
    reply = client.chat.completions.create(messages=messages, tools=[TOOL], **GREEDY)
    assert reply.choices[0].finish_reason in ("stop", "length")

"""Anthropic's Messages API, through its own client: the same prompts and answers as chat completions."""

import asyncio
import base64
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import anthropic
import orjson
import pydantic
import pytest

from saccade.inputs.placeholders import Prompt
from saccade.inputs.processor import Processor
from saccade.server.service import Service
from saccade.wire.sampling_params import SamplingParams
from tests.e2e.pictures import encoded, picture
from tests.inputs.folders import write_gemma
from tests.server.fake import Answer, Caller, FakeEngine, Script, service_for
from tests.server.sdk import saying, with_anthropic

MESSAGES, CHAT = "/v1/messages", "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS: list[Any] = [{"name": "add", "description": "adds", "input_schema": SCHEMA}]
CHAT_TOOLS = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA, "description": "adds"}}]
THOUGHTFUL = '<think>\nhm\n</think>\n\nLet me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
Serve = Callable[..., tuple[Service, FakeEngine]]


@pytest.fixture
def serve(processor: Processor) -> Serve:
    def make(script: Script | None = None, *, own: Processor | None = None, **settings: Any) -> Any:
        engine = FakeEngine(own or processor, script or saying("an answer"))
        return service_for(engine, **settings), engine

    return make


def create(service: Service, **fields: Any) -> anthropic.types.Message:
    fields = {"model": "m", "max_tokens": 64, "messages": HELLO, **fields}

    async def use(client: anthropic.AsyncAnthropic) -> Any:
        return await client.messages.create(**fields)

    found: anthropic.types.Message = with_anthropic(service, use)
    return found


def refused(service: Service, **fields: Any) -> Any:
    """The status and the error that the official client raises for a request."""
    with pytest.raises(anthropic.APIStatusError) as found:
        create(service, **fields)
    body: Any = found.value.body
    assert body["type"] == "error" and body["error"]["message"] and body["request_id"]
    return found.value.status_code, body["error"]


def posted(service: Service, path: str, body: dict[str, Any]) -> Any:
    return asyncio.run(Caller(service).post(path, body))


def test_an_answer_has_blocks_usage_and_an_id(serve: Serve) -> None:
    service, engine = serve()
    reply = create(service, metadata={"user_id": "someone"})
    assert reply.id.startswith("msg_") and reply.role == "assistant" and reply.model == "m"
    [block] = reply.content
    assert block.type == "text" and block.text == "an answer"
    assert reply.stop_reason == "end_turn" and reply.stop_sequence is None
    assert reply.usage.input_tokens == len(engine.seen[0][0]) and reply.usage.output_tokens == 3
    assert reply._request_id and reply.id.endswith(reply._request_id)


def test_cached_tokens_are_counted_separately(serve: Serve) -> None:
    async def script(prompt: Prompt, params: SamplingParams) -> AsyncGenerator[dict[str, Any], None]:
        yield {"text": "a", "token_ids": (5,), "num_cached_tokens": 2, "finish_reason": "stop"}

    service, engine = serve(script)
    usage = create(service).usage
    assert usage.cache_read_input_tokens == 2 and usage.input_tokens == len(engine.seen[0][0]) - 2


@pytest.mark.parametrize(
    ("script", "reason", "sequence"),
    [
        (saying("ab"), "end_turn", None),
        (saying("ab", stop_reason="END"), "stop_sequence", "END"),
        (saying("a" * 64, step=1, finish="length"), "max_tokens", None),
        (saying("ab", finish="length"), "model_context_window_exceeded", None),
        (saying(THOUGHTFUL), "tool_use", None),
    ],
)
def test_stop_reasons_are_anthropics(serve: Serve, script: Script, reason: str, sequence: str | None) -> None:
    service, _ = serve(script)
    reply = create(service, stop_sequences=["END"], tools=TOOLS)
    assert (reply.stop_reason, reply.stop_sequence) == (reason, sequence)


def test_the_events_of_a_stream_add_up_to_the_whole_answer(serve: Serve) -> None:
    service, _ = serve(saying(THOUGHTFUL), reasoning_parser="qwen3")
    whole = create(service, tools=TOOLS)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]

    async def use(client: anthropic.AsyncAnthropic) -> tuple[list[Any], Any]:
        raw = await client.messages.create(model="m", max_tokens=64, messages=HELLO, tools=TOOLS, stream=True)
        events = [event async for event in raw]
        async with client.messages.stream(model="m", max_tokens=64, messages=HELLO, tools=TOOLS) as stream:
            return events, await stream.get_final_message()

    events, final = with_anthropic(service, use)
    steps = ["content_block_start", "content_block_delta", "content_block_stop"]
    kinds = [event.type for i, event in enumerate(events) if not i or event.type != events[i - 1].type]
    assert kinds == ["message_start", *steps * 3, "message_delta", "message_stop"]
    assert events[0].message.content == [] and events[0].message.usage.input_tokens > 0
    for event in events:
        if event.type == "content_block_delta":
            assert event.delta.type == ["thinking_delta", "text_delta", "input_json_delta"][event.index]
    new_ids = {"id": ..., "parsed_output": ...}
    assert [vars(block) | new_ids for block in final.content] == [vars(block) | new_ids for block in whole.content]
    assert (final.stop_reason, final.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)


def test_conversations_give_the_same_prompts_as_chat_completions(serve: Serve) -> None:
    service, engine = serve()
    data = base64.b64encode(encoded(picture(1))).decode()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    messages: list[Any] = [
        {"role": "user", "content": [image, {"type": "text", "text": "what is it?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "I add."},
                {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "3"}]},
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "4"},
                {"type": "text", "text": "and now?"},
            ],
        },
        {"role": "system", "content": "be quick"},  # as Claude Code does
        {"role": "system", "content": [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}]},
    ]
    create(service, messages=messages, system=[{"type": "text", "text": "be brief"}], tools=TOOLS)
    call = {"id": "toolu_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    chat = [
        {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
        {"role": "user", "content": [url, {"type": "text", "text": "what is it?"}]},
        {"role": "assistant", "content": "I add.", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": [{"type": "text", "text": "3"}]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "4"},
        {"role": "user", "content": [{"type": "text", "text": "and now?"}]},
        {"role": "system", "content": "be quick"},
        {"role": "system", "content": [{"type": "text", "text": "be kind"}]},
    ]
    assert posted(service, CHAT, {"messages": chat, "tools": CHAT_TOOLS}).status == 200
    [one, other] = [prompt for prompt, _, _ in engine.seen]
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert [item.digest for item in one.media] == [item.digest for item in other.media] and len(one.media) == 1


def test_templates_that_insist_on_alternating_roles_take_what_agents_send(serve: Serve, tmp_path: Path) -> None:
    """Also through the Responses API; chat completions keep what the template says."""
    service, engine = serve(own=Processor.from_folder(write_gemma(tmp_path)))
    messages = [*HELLO, {"role": "user", "content": "and"}, {"role": "system", "content": "be quick"}]
    create(service, messages=messages, system="be brief")
    items = [{"role": "developer", "content": "be brief"}, *messages]
    assert posted(service, "/v1/responses", {"input": items}).status == 200
    joined = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi\n\nand\n\nbe quick"}]
    assert posted(service, CHAT, {"messages": joined}).status == 200
    one, other, plain = [prompt.token_ids.tolist() for prompt, _, _ in engine.seen]
    assert one == other == plain
    found = posted(service, CHAT, {"messages": messages})
    assert found.status == 400 and "roles must alternate, and the first is the user" in found.json["error"]["message"]


def test_conversations_of_claude_code_share_their_system_prompt(serve: Serve) -> None:
    service, engine = serve()
    for build in ("123", "4f5"):
        billing = {
            "type": "text",
            "text": f"x-anthropic-billing-header: cc_version=2.1.197.{build}; cc_entrypoint=cli;",
        }
        create(service, system=[billing, {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}])
    create(service, system=[{"type": "text", "text": "be brief"}])
    create(service, system=[billing])
    create(service)
    one, other, plain, *none = [prompt.token_ids.tolist() for prompt, _, _ in engine.seen]
    assert one == other == plain and none[0] == none[1] != plain


def test_sampling_fields_and_tool_choices_mean_the_same_as_in_chat_completions(serve: Serve) -> None:
    service, engine = serve()
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"temperature": 0.5, "top_p": 0.5, "top_k": 3}, {"temperature": 0.5, "top_p": 0.5, "top_k": 3}),
        ({"stop_sequences": ["a"]}, {"stop": ["a"]}),
        ({"tools": TOOLS, "tool_choice": {"type": "auto"}}, {"tools": CHAT_TOOLS}),
        ({"tools": [TOOLS[0] | {"name": "n" * 128}]}, {"tools": CHAT_TOOLS}),
        ({"tools": TOOLS, "tool_choice": {"type": "any"}}, {"tools": CHAT_TOOLS, "tool_choice": "required"}),
        (
            {"tools": TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            {"tools": CHAT_TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "add"}},
            {"tools": CHAT_TOOLS, "tool_choice": {"type": "function", "function": {"name": "add"}}},
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "none"}}, {"tools": CHAT_TOOLS, "tool_choice": "none"}),
        ({"tools": []}, {}),
    ]
    for ours, chat in pairs:
        for path, fields in ((MESSAGES, ours), (CHAT, chat)):
            assert posted(service, path, {"messages": HELLO, "max_tokens": 9, **fields}).status == 200, fields
        (prompt, params, _), (chat_prompt, chat_params, _) = engine.seen[-2:]
        assert params == chat_params and prompt.token_ids.tolist() == chat_prompt.token_ids.tolist(), ours


def test_a_final_assistant_message_is_continued(serve: Serve) -> None:
    service, engine = serve()
    create(service, messages=[*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "The answer is ("}]}])
    text = service.engine.processor.tokenizer.decode(engine.seen[0][0].token_ids.tolist(), skip_special_tokens=False)
    assert text.endswith("The answer is (")


def test_thinking_can_be_switched_and_hidden(serve: Serve, thinker: Processor) -> None:
    service, _ = serve(saying("hm</think>yes"), own=thinker, reasoning_parser="qwen3")
    for fields, kinds in (
        ({}, ["thinking", "text"]),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, ["thinking", "text"]),
        ({"thinking": {"type": "adaptive"}}, ["thinking", "text"]),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, ["text"]),
        ({"thinking": {"type": "disabled"}}, ["text"]),
    ):
        assert [block.type for block in create(service, **fields).content] == kinds, fields
    status, error = refused(serve()[0], thinking={"type": "enabled", "budget_tokens": 1024})
    assert status == 400 and "--reasoning-parser" in error["message"] and error["param"] == "thinking"


def test_a_pydantic_model_comes_back(serve: Serve) -> None:
    class Sum(pydantic.BaseModel):
        a: int

    service, engine = serve(saying('{"a": 7}'))

    async def use(client: anthropic.AsyncAnthropic) -> Any:
        return await client.messages.parse(model="m", max_tokens=64, messages=HELLO, output_format=Sum)

    assert with_anthropic(service, use).parsed_output == Sum(a=7)
    grammar = engine.seen[0][1].grammar
    assert grammar is not None and grammar.kind == "json_schema" and '"integer"' in grammar.text


def test_tokens_are_counted_without_running(serve: Serve) -> None:
    service, engine = serve()

    async def use(client: anthropic.AsyncAnthropic) -> int:
        return (await client.messages.count_tokens(model="m", messages=HELLO, system="be brief")).input_tokens

    count = with_anthropic(service, use)
    assert not engine.seen
    assert count == create(service, system="be brief").usage.input_tokens


def test_a_call_that_is_cut_off_is_still_a_block(serve: Serve) -> None:
    service, _ = serve(saying('<tool_call>\n{"name": "add", "arguments": {"a": 1', finish="length"))
    reply = create(service, tools=TOOLS, max_tokens=5)
    [block] = reply.content
    assert block.type == "tool_use" and block.name == "add" and block.input == {} and reply.stop_reason == "max_tokens"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "system", "content": [{"type": "image"}]}]}, "messages[1].content[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [{"type": "image"}]}]}, "messages[1].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0]"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[1].content[0]"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [{"name": "add"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [*TOOLS, *TOOLS]}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"thinking": {"type": "always"}}, "thinking.type"),
        ({"extra_body": {"temperature": -1}}, "temperature"),
        ({"extra_body": {"mcp_servers": [{"url": "x"}]}}, "mcp_servers"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "output_config.format"),
    ],
)
def test_errors_name_the_field(serve: Serve, fields: dict[str, Any], param: str) -> None:
    status, error = refused(serve()[0], **fields)
    assert status == 400 and error["type"] == "invalid_request_error" and error["param"] == param, error


def test_late_errors_name_the_clients_block(serve: Serve) -> None:
    service, _ = serve()
    bad = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    far = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    file = {"type": "image", "source": {"type": "file", "file_id": "a"}}
    for block in (bad, far, file):
        result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "x"}, block]}
        status, error = refused(service, messages=[{"role": "user", "content": [result]}], system="be brief")
        assert status == 400 and error["param"].startswith("messages[0].content[0].content[1]"), error
        status, error = refused(service, messages=[*HELLO, {"role": "user", "content": [block]}], system="be brief")
        assert status == 400 and error["param"].startswith("messages[1].content[0]"), error
    calls = [{"type": "tool_use", "id": "a", "name": "add", "input": {}}]
    status, error = refused(service, messages=[*HELLO, {"role": "assistant", "content": calls}])
    assert error["param"] == "messages[1]" and "tool_result" in error["message"]


def test_errors_have_anthropics_types_and_statuses(serve: Serve) -> None:
    service, _ = serve(api_key=("secret",))
    status, error = refused(service)
    assert (status, error["type"]) == (401, "authentication_error")

    async def use(client: anthropic.AsyncAnthropic) -> Any:
        return await client.messages.create(model="m", max_tokens=5, messages=HELLO)

    assert with_anthropic(service, use, key="secret").content
    assert refused(serve()[0], model="other")[0] == 404
    status, error = refused(serve(max_body_bytes=1024)[0], system="x" * 2000)
    assert (status, error["type"]) == (413, "request_too_large")
    reply = asyncio.run(Caller(service_for(None)).post(MESSAGES, {"messages": HELLO}))
    assert reply.status == 503 and reply.json["error"]["type"] == "overloaded_error"
    missing = asyncio.run(Caller(serve()[0]).get(f"{MESSAGES}/batches"))
    assert missing.status == 404 and missing.json["type"] == "error"
    assert missing.headers["request-id"] == missing.json["request_id"]


def test_a_stream_that_fails_ends_with_an_error(serve: Serve) -> None:
    async def script(prompt: Prompt, params: SamplingParams) -> AsyncGenerator[dict[str, Any], None]:
        yield {"text": "a", "token_ids": (5,)}
        yield {"finish_reason": "error", "stop_reason": "broken"}

    service, _ = serve(script)

    async def use(client: anthropic.AsyncAnthropic) -> list[str]:
        seen: list[str] = []
        with pytest.raises(anthropic.APIStatusError, match="the engine failed"):
            async for event in await client.messages.create(model="m", max_tokens=5, messages=HELLO, stream=True):
                seen.append(event.type)
        return seen

    assert with_anthropic(service, use)[0] == "message_start"
    reply = posted(service, MESSAGES, {"messages": HELLO, "max_tokens": 5, "stream": True})
    assert b"[DONE]" not in reply.body and reply.body.rpartition(b"event: ")[2].startswith(b"error\n")


def test_an_aborted_request_gets_an_error(serve: Serve) -> None:
    service, _ = serve(saying("a", finish="abort"))
    status, error = refused(service)
    assert status == 500 and error["code"] == "aborted" and error["type"] == "api_error"


def test_silence_is_broken_by_pings(serve: Serve) -> None:
    """The engine is silent until a ping has come, however long that takes."""
    answer, ping = Answer(), b'event: ping\ndata: {"type":"ping"}\n\n'

    async def script(prompt: Prompt, params: SamplingParams) -> AsyncGenerator[dict[str, Any], None]:
        yield {"text": "a", "token_ids": (5,)}
        while ping not in answer.body:
            await asyncio.sleep(0.01)
        yield {"text": "b", "token_ids": (5,), "finish_reason": "stop"}

    service, _ = serve(script, sse_ping_s=0.03)
    body = orjson.dumps({"messages": HELLO, "max_tokens": 5, "stream": True})
    asyncio.run(Caller(service).call("POST", MESSAGES, body, {"content-type": "application/json"}, answer=answer))
    assert answer.is_complete and b'"text":"b"' in answer.body.partition(ping)[2]

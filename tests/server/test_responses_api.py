"""OpenAI's Responses API, through its own client: the same prompts and answers as chat completions."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any

import openai
import orjson
import pydantic
import pytest

from saccade.client.output import Logprob
from saccade.inputs.placeholders import Prompt
from saccade.inputs.processor import Processor
from saccade.inputs.text.chat_template import ChatTemplate
from saccade.server.http.body_scan import Body
from saccade.server.http.exchange import HttpExchange
from saccade.server.response_store import EMPTY_CONVERSATION, ResponseStore
from saccade.server.routes.responses_api import ResponsesRoute
from saccade.server.service import Service
from saccade.wire.sampling_params import SamplingParams
from tests.e2e.pictures import data_url, encoded, picture
from tests.server.fake import HANG_S, Caller, FakeEngine, Script, service_for
from tests.server.sdk import saying, with_openai

RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS: list[Any] = [{"type": "function", "name": "add", "description": "adds", "parameters": SCHEMA}]
CHAT_TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": SCHEMA}}]
CALL = '{"name": "add", "arguments": {"a": 1}}'
THOUGHTFUL = '<think>\nhm\n</think>\n\nLet me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
IMAGE = {"type": "input_image", "image_url": data_url(encoded(picture(1)))}
Serve = Callable[..., tuple[Service, FakeEngine]]


@pytest.fixture
def serve(processor: Processor) -> Serve:
    def make(script: Script | None = None, **settings: Any) -> tuple[Service, FakeEngine]:
        engine = FakeEngine(processor, script or saying("an answer"))
        return service_for(engine, **settings), engine

    return make


def create(service: Service, **fields: Any) -> Any:
    async def use(client: openai.AsyncOpenAI) -> Any:
        return await client.responses.create(**{"model": "m", "input": "hi", **fields})

    return with_openai(service, use)


def refused(service: Service, **fields: Any) -> tuple[int, Any]:
    with pytest.raises(openai.APIStatusError) as found:
        create(service, **fields)
    body: Any = found.value.body
    return found.value.status_code, body


def posted(service: Service, path: str, body: dict[str, Any]) -> Any:
    return asyncio.run(Caller(service).post(path, body))


def said(engine: FakeEngine) -> str:
    """The text of the last prompt."""
    return engine.processor.tokenizer.decode(engine.seen[-1][0].token_ids.tolist(), skip_special_tokens=False)


def test_an_answer_has_items_usage_and_the_requests_fields(serve: Serve) -> None:
    service, engine = serve()
    reply = create(service, instructions="be brief", max_output_tokens=9, metadata={"a": "b"}, temperature=0.5)
    assert reply.id.startswith("resp_") and reply.object == "response" and reply.model == "m"
    [item] = reply.output
    assert item.type == "message" and item.status == "completed" and reply.output_text == "an answer"
    assert reply.status == "completed" and reply.error is None and reply.incomplete_details is None
    assert reply.usage.input_tokens == len(engine.seen[0][0]) and reply.usage.output_tokens == 3
    assert reply.usage.total_tokens == reply.usage.input_tokens + 3
    assert (reply.instructions, reply.max_output_tokens, reply.metadata) == ("be brief", 9, {"a": "b"})
    assert reply.temperature == 0.5 and reply.top_p == 1 and reply.tools == [] and reply.tool_choice == "auto"
    assert engine.seen[0][1].max_tokens == 9 and "be brief" in said(engine)


def test_an_answer_that_is_cut_off_is_incomplete(serve: Serve) -> None:
    reply = create(serve(saying("abc", finish="length"))[0])
    assert reply.status == "incomplete" and reply.incomplete_details.reason == "max_output_tokens"
    assert reply.output[0].status == "incomplete" and reply.output_text == "abc"
    service, _ = serve(saying('<tool_call>\n{"name": "add", "arguments": {"a": 1', finish="length"))
    [call] = create(service, tools=TOOLS).output
    assert call.type == "function_call" and call.arguments == '{"a": 1' and call.status == "incomplete"


def test_the_events_of_a_stream_add_up_to_the_whole_answer(serve: Serve) -> None:
    service, _ = serve(saying(THOUGHTFUL), reasoning_parser="qwen3")
    whole = create(service, tools=TOOLS)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert whole.output[0].content[0].text == "hm" and whole.output[2].arguments == '{"a": 1}'
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens

    async def use(client: openai.AsyncOpenAI) -> tuple[list[Any], Any]:
        raw = await client.responses.create(model="m", input="hi", tools=TOOLS, stream=True)
        events = [event async for event in raw]
        async with client.responses.stream(model="m", input="hi", tools=TOOLS) as stream:
            return events, await stream.get_final_response()

    events, final = with_openai(service, use)
    kinds = [event.type for i, event in enumerate(events) if not i or event.type != events[i - 1].type]
    assert kinds == [
        "response.created",
        "response.in_progress",
        *("response.output_item.added", "response.content_part.added"),
        *("response.reasoning_text.delta", "response.reasoning_text.done"),
        *("response.content_part.done", "response.output_item.done"),
        *("response.output_item.added", "response.content_part.added"),
        *("response.output_text.delta", "response.output_text.done"),
        *("response.content_part.done", "response.output_item.done"),
        "response.output_item.added",
        *("response.function_call_arguments.delta", "response.function_call_arguments.done"),
        *("response.output_item.done", "response.completed"),
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].response.status == "in_progress" and events[0].response.usage is None
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(texts) > 1 and "".join(texts) == whole.output_text == final.output_text
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.usage == whole.usage


def test_tokens_of_reasoning_are_counted_even_if_the_answer_comes_with_them(serve: Serve) -> None:
    async def script(prompt: Any, params: Any) -> AsyncGenerator[dict[str, Any], None]:
        close = engine.processor.tokenizer.token_id("</think>")
        yield {"text": "<think>\nh", "token_ids": (5, 5)}
        yield {"text": "m\n</think>\n\nye", "token_ids": (5, close, 6, 7)}
        yield {"text": "s", "token_ids": (7,), "finish_reason": "stop"}

    service, engine = serve(script, reasoning_parser="qwen3")
    reply = create(service)
    assert reply.output_text == "yes" and reply.usage.output_tokens == 7
    assert reply.usage.output_tokens_details.reasoning_tokens == 4


def test_log_probabilities_are_those_of_the_text(serve: Serve) -> None:
    """Not those of reasoning, calls and special tokens. A token without a text of its own goes with the next."""

    async def script(prompt: Any, params: SamplingParams) -> AsyncGenerator[dict[str, Any], None]:
        tokenizer = engine.processor.tokenizer
        special = {tag: tokenizer.token_id(tag) for tag in ("</think>", "<|im_end|>")}
        said = ["<think>", "hm", "</think>", "A", "", "é", "<", "b", "<tool_call>", CALL, "</tool_call>", "<|im_end|>"]
        for i, text in enumerate(said):
            token = special.get(text, 20 + i)
            found = {token: Logprob(-i / 8, 1), 9: Logprob(-3.0, 2)}
            finish = {"finish_reason": "stop"} if i == len(said) - 1 else {}
            shown = "" if text == "<|im_end|>" else text
            yield {"text": shown, "token_ids": (token,), **finish} | (
                {} if params.logprobs is None else {"logprobs": (found,)}
            )

    service, engine = serve(script, reasoning_parser="qwen3")
    fields: Any = {"tools": TOOLS, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    reply = create(service, **fields)
    part = reply.output[1].content[0]
    assert part.text == "Aé<b" and reply.top_logprobs == engine.seen[0][1].logprobs == 2
    assert [entry.logprob for entry in part.logprobs] == [-i / 8 for i in (3, 4, 5, 6, 7)]
    assert [len(entry.top_logprobs) for entry in part.logprobs] == [2] * 5
    assert isinstance(part.logprobs[0].bytes, list) and part.logprobs[0].top_logprobs[1].logprob == -3.0

    async def use(client: openai.AsyncOpenAI) -> list[Any]:
        return [event async for event in await client.responses.create(model="m", input="hi", stream=True, **fields)]

    events = with_openai(service, use)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    [done] = [event for event in events if event.type == "response.output_text.done"]
    told = [entry.logprob for event in deltas for entry in event.logprobs]
    assert told == [entry.logprob for entry in done.logprobs] == [entry.logprob for entry in part.logprobs]
    assert events[-1].response.output[1].content[0].logprobs == part.logprobs
    assert create(service, tools=TOOLS).output[1].content[0].logprobs == []


def test_the_tokens_of_an_input_are_counted_without_an_answer(serve: Serve) -> None:
    service, engine = serve()

    async def use(client: openai.AsyncOpenAI) -> Any:
        fields: Any = {"input": [{"role": "user", "content": "hi"}], "instructions": "be brief", "tools": TOOLS}
        return await client.responses.input_tokens.count(model="m", **fields)

    counted = with_openai(service, use)
    assert counted.object == "response.input_tokens" and not engine.seen
    assert counted.input_tokens == create(service, instructions="be brief", tools=TOOLS).usage.input_tokens
    assert posted(service, f"{RESPONSES}/input_tokens", {"input": 5}).json["error"]["param"] == "input"


def test_inputs_give_the_same_prompts_as_chat_completions(serve: Serve) -> None:
    service, engine = serve()
    url = data_url(encoded(picture(1)))
    image = {"type": "input_image", "image_url": url, "detail": "original"}
    items: list[Any] = [
        {"role": "user", "content": [image, {"type": "input_text", "text": "what is it?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I add.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": '{"a": 2}'},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "4"}]},
        {"type": "reasoning", "id": "rs_2", "summary": []},
        {"role": "developer", "content": "be quick"},
        {"role": "user", "content": "and now?"},
    ]
    create(service, input=items, instructions="be brief", tools=TOOLS)
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "add", "arguments": f'{{"a": {i}}}'}} for i in (1, 2)
    ]
    part = {"type": "image_url", "image_url": {"url": url, "detail": "high"}}
    chat = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [part, {"type": "text", "text": "what is it?"}]},
        {"role": "assistant", "content": "I add.", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "4"}]},
        {"role": "developer", "content": "be quick"},
        {"role": "user", "content": "and now?"},
    ]
    assert posted(service, CHAT, {"messages": chat, "tools": CHAT_TOOLS}).status == 200
    [one, other] = [prompt for prompt, _, _ in engine.seen]
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert [item.digest for item in one.media] == [item.digest for item in other.media] and len(one.media) == 1


def test_fields_mean_the_same_as_in_chat_completions(serve: Serve) -> None:
    service, engine = serve()
    schema = {"name": "sum", "schema": SCHEMA, "strict": True}
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"temperature": 0.5, "top_p": 0.5, "stop": ["x"]}, {"temperature": 0.5, "top_p": 0.5, "stop": ["x"]}),
        ({"max_output_tokens": 7}, {"max_completion_tokens": 7}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        (
            {"text": {"format": {"type": "json_schema", **schema}}},
            {"response_format": {"type": "json_schema", "json_schema": schema}},
        ),
        ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, {}),
        ({"tools": TOOLS, "tool_choice": "required"}, {"tools": CHAT_TOOLS, "tool_choice": "required"}),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "name": "add"}},
            {"tools": CHAT_TOOLS, "tool_choice": {"type": "function", "function": {"name": "add"}}},
        ),
        ({"tools": TOOLS, "tool_choice": "none"}, {"tools": CHAT_TOOLS, "tool_choice": "none"}),
        ({"tools": [], "store": False, "truncation": "disabled", "include": ["reasoning.encrypted_content"]}, {}),
        ({"tools": [{"type": "web_search"}], "include": ["web_search_call.action.sources"]}, {}),
    ]
    for ours, chat in pairs:
        for path, fields in (
            (RESPONSES, {"input": "hi", **ours}),
            (CHAT, {"messages": [{"role": "user", "content": "hi"}], **chat}),
        ):
            assert posted(service, path, fields).status == 200, fields
        (prompt, params, _), (chat_prompt, chat_params, _) = engine.seen[-2:]
        assert params == chat_params and prompt.token_ids.tolist() == chat_prompt.token_ids.tolist(), ours


def test_a_pydantic_model_comes_back(serve: Serve) -> None:
    class Sum(pydantic.BaseModel):
        a: int

    service, engine = serve(saying('{"a": 7}'))

    async def use(client: openai.AsyncOpenAI) -> tuple[Any, Any]:
        parsed = await client.responses.parse(model="m", input="hi", text_format=Sum)
        async with client.responses.stream(model="m", input="hi", text_format=Sum) as stream:
            return parsed, await stream.get_final_response()

    parsed, streamed = with_openai(service, use)
    assert parsed.output_parsed == streamed.output_parsed == Sum(a=7)
    grammar = engine.seen[0][1].grammar
    assert grammar is not None and grammar.kind == "json_schema" and '"integer"' in grammar.text


def test_thinking_can_be_switched_off(serve: Serve) -> None:
    service, engine = serve(reasoning_parser="qwen3")
    chat = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"enable_thinking": False}}
    create(service, reasoning={"effort": "none"})
    ours = said(engine)
    posted(service, CHAT, chat)
    assert said(engine) == ours
    assert create(service, reasoning={"effort": "high"}).reasoning.effort == "high"


def test_codex_can_call_a_tool_of_a_namespace_and_offer_a_web_search(
    serve: Serve, processor: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codex's request, shortened: it groups tools, and says of which group the called one is."""
    template = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson }}{% endfor %}"
    monkeypatch.setattr(processor, "template", ChatTemplate(template))
    service, engine = serve(
        saying('<tool_call>\n{"name": "agents__close", "arguments": {"a": 1}}\n</tool_call>'), strict=True
    )
    close = {"type": "function", "name": "close", "strict": False, "parameters": SCHEMA}
    spawn = close | {"name": "spawn"}
    group = {"type": "namespace", "name": "agents", "description": "d", "tools": [close, spawn]}
    search = {"type": "web_search", "external_web_access": True}
    fields: Any = {
        "tools": [*TOOLS, group, search],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
    }
    item = {"type": "function_call", "call_id": "c1", "name": "close", "namespace": "agents", "arguments": "{}"}
    items = [{"role": "user", "content": "x"}, item, {"type": "function_call_output", "call_id": "c1", "output": "ok"}]
    whole = posted(service, RESPONSES, {"input": items, **fields})
    prompt = said(engine)
    assert prompt.count('"agents__close"') == 2 and '"agents__spawn"' in prompt and "web_search" not in prompt
    [call] = whole.json["output"]
    assert (call["name"], call["namespace"], call["arguments"]) == ("close", "agents", '{"a": 1}')
    assert whole.json["tools"] == [*TOOLS, group] and "tools.web_search" in whole.headers["x-ignored-fields"]

    async def use(client: openai.AsyncOpenAI) -> list[Any]:
        return [event async for event in await client.responses.create(model="m", input="x", stream=True, **fields)]

    events = with_openai(service, use)
    told = [event.item for event in events if event.type.startswith("response.output_item")]
    assert [(item.name, item.namespace) for item in told] == [("close", "agents")] * 2
    create(service, **fields | {"tool_choice": {"type": "function", "name": "spawn", "namespace": "agents"}})
    grammar = engine.seen[-1][1].grammar
    assert grammar is not None and "agents__spawn" in grammar.text and "agents__close" not in grammar.text


def test_items_of_stored_answers_can_be_referred_to(serve: Serve) -> None:
    """Vercel's AI SDK sends the ids of what it got, unless told not to store anything."""
    service, engine = serve(
        saying(THOUGHTFUL), response_store_bytes=10**6, reasoning_parser="qwen3", api_key=("a", "b")
    )

    def ask(items: list[Any], key: str = "a", **fields: Any) -> Any:
        body = {"input": items, "tools": TOOLS, **fields}
        return asyncio.run(Caller(service).post(RESPONSES, body, authorization=f"Bearer {key}"))

    user = {"role": "user", "content": "one"}
    output = ask([user]).json["output"]
    result = {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "3"}
    references = [{"type": "item_reference", "id": item["id"]} for item in output]
    assert ask([user, *references, result]).status == 200
    referred = said(engine)
    assert ask([user, *output, result], store=False).status == 200
    assert said(engine) == referred and "Let me see." in referred
    for key, reference in (("b", references[0]), ("a", {"type": "item_reference", "id": "msg_1"})):
        refusal = ask([user, reference], key)
        assert refusal.status == 404 and refusal.json["error"]["param"] == "input[1]"
    twice = ask([user, *references, references[0]])
    assert twice.status == 400 and twice.json["error"]["param"] == f"input[{len(references) + 1}]"
    assert "input[1]" in twice.json["error"]["message"]


def test_a_stored_conversation_can_be_continued(serve: Serve) -> None:
    service, engine = serve(saying(THOUGHTFUL), response_store_bytes=10**6)
    first = create(service, input="one", tools=TOOLS)
    assert first.model_extra["store"] is True
    output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "3"}
    second = create(service, input=[output], tools=TOOLS, previous_response_id=first.id)
    by_hand = [{"role": "user", "content": "one"}, *(item.to_dict() for item in first.output), output]
    stored = said(engine)
    create(service, input=by_hand, tools=TOOLS, store=False)
    assert said(engine) == stored and second.previous_response_id == first.id
    third = create(service, input="and?", previous_response_id=second.id)
    assert said(engine).count("Let me see.") == 2 and third.previous_response_id == second.id
    unkept = create(service, store=False)
    assert refused(service, previous_response_id=unkept.id)[0] == 404


def test_a_conversation_that_ends_in_a_cut_off_call_can_be_continued(serve: Serve) -> None:
    """With an error for the call, or without an answer to it."""
    cut = '<tool_call>\n{"name": "add", "arguments": {"a": 1'
    service, engine = serve(saying(cut, finish="length"), response_store_bytes=10**6)
    first = create(service, input="one", tools=TOOLS)
    [call] = first.output
    assert (call.status, call.arguments) == ("incomplete", '{"a": 1')
    error = {"type": "function_call_output", "call_id": call.call_id, "output": "not JSON"}
    create(service, input=[error], tools=TOOLS, previous_response_id=first.id)
    assert "not JSON" in said(engine)
    create(service, input="go on", tools=TOOLS, previous_response_id=first.id)
    assert "go on" in said(engine)


def test_a_conversation_of_another_caller_is_not_found(serve: Serve) -> None:
    service, _ = serve(api_key=("a", "b"), response_store_bytes=10**6)

    async def ask(key: str, **fields: Any) -> Any:
        return await Caller(service).post(RESPONSES, {"input": "hi", **fields}, authorization=f"Bearer {key}")

    first = asyncio.run(ask("a")).json["id"]
    assert asyncio.run(ask("b", previous_response_id=first)).status == 404
    assert asyncio.run(ask("a", previous_response_id=first)).status == 200


def test_conversations_with_the_same_request_id_do_not_mix(serve: Serve) -> None:
    """A client that forwards a trace id sends it with several requests, some at the same time."""
    both = asyncio.Event()

    async def waiting(prompt: Prompt, params: SamplingParams) -> AsyncGenerator[dict[str, Any], None]:
        yield {"text": "a", "token_ids": (5,)}
        both.set() if len(engine.running) > 1 else await both.wait()
        yield {"text": "b", "token_ids": (6,), "finish_reason": "stop"}

    service, engine = serve(waiting, response_store_bytes=10**6)
    caller = Caller(service)

    async def ask(text: str, **fields: Any) -> Any:
        return (await caller.post(RESPONSES, {"input": text, **fields}, x_request_id="trace")).json

    async def run() -> None:
        first, second = await asyncio.gather(ask("apples"), ask("pears"))
        assert first["output"][0]["id"] != second["output"][0]["id"]
        for reply, word in ((first, "apples"), (second, "pears")):
            await ask("and?", previous_response_id=reply["id"])
            assert [found for found in ("apples", "pears") if found in said(engine)] == [word]

    asyncio.run(run())


def test_the_store_is_bounded() -> None:
    store, one = ResponseStore(10_000), EMPTY_CONVERSATION.then(["x" * 3000])
    for name in ("a", "b"):
        store.begin("me", name, one)
        assert store.get("me", name) is None, "it is still running"
        store.finish("me", name, [])
    assert store.get("me", "a") == one, "now b is evicted first"
    store.begin("me", "c", one)
    store.finish("me", "c", [])
    assert [store.get("me", name) is not None for name in "abc"] == [True, False, True]
    assert store.num_bytes == 2 * one.num_bytes <= 10_000
    store.begin("me", "large", EMPTY_CONVERSATION.then(["x" * 20_000]))
    store.finish("me", "large", [])
    assert store.get("me", "large") is None and store.get("me", "a") == one, "nothing is evicted for what cannot fit"
    store.begin("me", "grows", one)
    store.finish("me", "grows", ["x" * 20_000])
    assert store.get("me", "grows") is None and store.num_bytes <= 10_000


def test_only_running_requests_are_dropped() -> None:
    store = ResponseStore(10_000)
    store.begin("me", "a", EMPTY_CONVERSATION)
    store.finish("me", "a", ["x"])
    store.drop("me", "a")
    assert store.get("me", "a") == EMPTY_CONVERSATION.then(["x"])
    store.begin("me", "b", EMPTY_CONVERSATION)
    store.drop("me", "b")
    store.finish("me", "b", [])
    assert store.get("me", "b") is None
    store.begin("me", "a", EMPTY_CONVERSATION)
    store.drop("me", "a")
    assert store.num_bytes == 0


def test_failed_requests_are_not_stored(serve: Serve) -> None:
    service, _ = serve(response_store_bytes=10**6)
    message = {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}
    assert refused(service, input=[message])[0] == 400 and service.responses.num_bytes == 0


def test_a_client_that_leaves_while_its_body_is_read_leaves_nothing_in_the_store(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, _ = serve(response_store_bytes=10**6)
    is_gone, is_begun, is_read = asyncio.Event(), threading.Event(), threading.Event()
    is_over = threading.Event()

    def read(route: ResponsesRoute, exchange: HttpExchange, body: Body) -> Any:
        is_begun.set()
        assert is_over.wait(HANG_S)
        try:
            return own(route, exchange, body)
        finally:
            is_read.set()

    own = ResponsesRoute.read
    monkeypatch.setattr(ResponsesRoute, "read", read)

    async def run() -> None:
        body, kind = orjson.dumps({"input": "hi"}), {"content-type": "application/json"}
        call = asyncio.create_task(Caller(service).call("POST", RESPONSES, body, kind, gone=is_gone))
        assert await asyncio.to_thread(is_begun.wait, HANG_S)
        is_gone.set()
        await call
        is_over.set()
        assert await asyncio.to_thread(is_read.wait, HANG_S)

    asyncio.run(run())
    assert service.responses.num_bytes == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "reasoning", "id": "a", "summary": []}]}, "input"),
        ({"input": [{"role": "user", "content": [IMAGE | {"detail": "huge"}]}]}, "input[0].content[0].detail"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "a"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": "a"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"metadata": {"a": 5}}, "metadata.a"),
        ({"tools": [{"type": "file_search"}]}, "tools[0]"),
        ({"tools": [{"type": ["function"]}]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0]"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]}, "tools[0].tools[0]"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [*TOOLS, TOOLS[0] | {"name": "a b"}]}]},
            "tools[0].tools[1]",
        ),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a", "parameters": 5}]}, "tools[0].parameters"),
        ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": 5}}}}, "text.format"),
    ],
)
def test_errors_name_the_field(serve: Serve, fields: dict[str, Any], param: str) -> None:
    status, error = refused(serve()[0], **fields)
    assert status == 400 and error["param"] == param, error


def test_late_errors_name_the_clients_item(serve: Serve) -> None:
    service, _ = serve(response_store_bytes=10**6)
    for url in ("data:image/png;base64,AAAA", "https://example.com/a.png"):
        message = {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
        status, error = refused(service, input=[{"role": "user", "content": "x"}, message], instructions="be brief")
        assert status == 400 and error["param"] == "input[1].content[0]", error
    status, error = refused(service, input="x" * 5000)
    assert status == 400 and error["param"] == "input" and error["code"] == "context_length_exceeded"


def test_tools_nested_too_deeply_for_the_reply_are_refused(serve: Serve) -> None:
    schema: Any = {}
    for _ in range(245):
        schema = {"a": schema}
    tool = {"type": "function", "name": "add", "parameters": {"type": "object", "x": schema}}
    assert refused(serve()[0], tools=[tool])[0] == 400


def test_a_stream_that_fails_ends_with_an_error(serve: Serve) -> None:
    async def script(prompt: Prompt, params: SamplingParams) -> AsyncGenerator[dict[str, Any], None]:
        yield {"text": "a", "token_ids": (5,)}
        yield {"finish_reason": "error", "stop_reason": "broken"}

    service, _ = serve(script, response_store_bytes=10**6)

    async def use(client: openai.AsyncOpenAI) -> list[Any]:
        return [event async for event in await client.responses.create(model="m", input="hi", stream=True)]

    events = with_openai(service, use)
    assert events[0].type == "response.created" and events[-1].type == "response.failed"
    assert events[-1].response.error.code == "server_error" and "engine" in events[-1].response.error.message
    assert events[-1].sequence_number == len(events) - 1 and service.responses.num_bytes == 0
    assert b"[DONE]" not in posted(service, RESPONSES, {"input": "hi", "stream": True}).body
    assert refused(service)[0] == 500

"""Tool call arguments are streamed as they are written, through the official clients of all three APIs."""

import asyncio
from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest

from saccade.inputs.processor import Processor
from saccade.server.service import Service
from tests.server.fake import Caller, FakeEngine, service_for
from tests.server.sdk import saying, with_anthropic, with_openai

ARGUMENTS = ('{"city": "Zürich <b>", "days": [1, 2, {"x": "</tool_call>"}]}', '{"a": 1}')
CALLS = "".join(f'\n<tool_call>\n{{"name": "add", "arguments": {text}}}\n</tool_call>' for text in ARGUMENTS)
HELLO: list[Any] = [{"role": "user", "content": "hi"}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT_TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
FLAT_TOOLS: list[Any] = [{"type": "function", "name": "add", "parameters": SCHEMA}]
CLAUDE_TOOLS: list[Any] = [{"name": "add", "input_schema": SCHEMA}]


@pytest.fixture
def serve(processor: Processor) -> Callable[..., Service]:
    return lambda text, **how: service_for(FakeEngine(processor, saying(text, **how)))


Serve = Callable[..., Service]


def test_chat_completions(serve: Serve) -> None:
    async def use(client: openai.AsyncOpenAI) -> tuple[Any, list[Any]]:
        common: dict[str, Any] = {"model": "m", "messages": HELLO, "tools": CHAT_TOOLS}
        whole = await client.chat.completions.create(**common)
        return whole, [chunk async for chunk in await client.chat.completions.create(**common, stream=True)]

    whole, chunks = with_openai(serve(f"Let me see.{CALLS}"), use)
    calls = whole.choices[0].message.tool_calls
    assert [call.function.arguments for call in calls] == [*ARGUMENTS], "as they were written"
    pieces: list[list[str]] = [[], []]
    for piece in [piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or ()]:
        is_first = not pieces[piece.index]
        assert (piece.id, piece.type, piece.function.name).count(None) == (0 if is_first else 3)
        assert (piece.function.arguments == "") is is_first
        pieces[piece.index].append(piece.function.arguments)
    assert ["".join(texts) for texts in pieces] == [*ARGUMENTS] and len(pieces[0]) > 15
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Let me see."
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_messages(serve: Serve) -> None:
    async def use(client: anthropic.AsyncAnthropic) -> tuple[list[Any], Any]:
        common: dict[str, Any] = {"model": "m", "messages": HELLO, "max_tokens": 99, "tools": CLAUDE_TOOLS}
        raw = [event async for event in await client.messages.create(**common, stream=True)]
        async with client.messages.stream(**common) as stream:
            return raw, await stream.get_final_message()

    events, final = with_anthropic(serve(CALLS), use)
    kinds = [event.type for event in events if "block" in event.type]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2 and len(kinds) > 20
    for index, arguments in enumerate(ARGUMENTS):
        pieces = [event.delta.partial_json for event in events if getattr(event, "delta", None) and event.type ==
                  "content_block_delta" and event.index == index]  # fmt: skip
        assert "".join(pieces) == arguments and len(pieces) > 1
    assert [block.input for block in final.content][1] == {"a": 1} and final.stop_reason == "tool_use"


def test_responses(serve: Serve) -> None:
    async def use(client: openai.AsyncOpenAI) -> list[Any]:
        stream = await client.responses.create(model="m", input="hi", tools=FLAT_TOOLS, stream=True)
        return [event async for event in stream]

    events = with_openai(serve(CALLS), use)
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    for index, arguments in enumerate(ARGUMENTS):
        pieces = [event.delta for event in deltas if event.output_index == index]
        assert "".join(pieces) == done[index].arguments == arguments and len(pieces) > 1
    output = events[-1].response.output
    assert [(item.arguments, item.status) for item in output] == [(text, "completed") for text in ARGUMENTS]
    assert [event.sequence_number for event in events] == [*range(len(events))]


@pytest.mark.parametrize(("finish", "stop"), [("length", None), ("stop", "]"), ("stop", 7)])
def test_a_call_that_is_cut_off_keeps_the_streamed_arguments(serve: Serve, finish: str, stop: str | int | None) -> None:
    """By the length limit, a stop string or a stop token; either way the client is not told to run it."""
    text = '<tool_call>\n{"name": "add", "arguments": {"a": [1'
    service = serve(text, finish=finish, stop_reason=stop)
    body = {"messages": HELLO, "tools": CHAT_TOOLS}
    [choice] = asyncio.run(Caller(service).post("/v1/chat/completions", body)).json["choices"]
    chunks = asyncio.run(Caller(service).post("/v1/chat/completions", body | {"stream": True})).events[:-1]
    calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert arguments == choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": [1'
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"] == finish
    asked = {"input": "hi", "tools": FLAT_TOOLS}
    whole = asyncio.run(Caller(service).post("/v1/responses", asked)).json["output"]
    assert [(item["arguments"], item["status"]) for item in whole] == [('{"a": [1', "incomplete")]


def test_a_stop_string_in_a_call_ends_a_message_with_that_string(serve: Serve) -> None:
    service = serve(f'{CALLS}\n<tool_call>\n{{"name": "add", "arguments": {{"a": [1', stop_reason="]")

    async def use(client: anthropic.AsyncAnthropic) -> list[Any]:
        common: dict[str, Any] = {"model": "m", "messages": HELLO, "max_tokens": 99, "tools": CLAUDE_TOOLS}
        async with client.messages.stream(**common) as stream:
            streamed = await stream.get_final_message()
        return [streamed, await client.messages.create(**common)]

    for message in with_anthropic(service, use):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "]")
        assert [block.type for block in message.content] == ["tool_use"] * 3


def test_a_streamed_call_that_the_model_never_finished_is_not_to_be_run(serve: Serve) -> None:
    service = serve('<tool_call>\n{"name": "add", "arguments": {"a": [1')
    body = {"messages": HELLO, "tools": CHAT_TOOLS, "stream": True}
    chunks = asyncio.run(Caller(service).post("/v1/chat/completions", body)).events[:-1]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"

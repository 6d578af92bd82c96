"""OpenAI's Responses API with the real client against a real server."""

import json
from typing import Any

import openai
import pytest

from tests.e2e.pictures import asked, data_url, encoded, image_part, picture

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 8, "extra_body": {"ignore_eos": True}}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}


def chat_text(client: openai.OpenAI, messages: list[Any]) -> str | None:
    reply = client.chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_tokens=8, extra_body={"ignore_eos": True}
    )
    text: str | None = reply.choices[0].message.content
    return text


def test_the_answer_is_that_of_chat_completions(client: openai.OpenAI) -> None:
    reply = client.responses.create(input="hello there", **GREEDY)
    text = chat_text(client, [{"role": "user", "content": "hello there"}])
    assert reply.output_text == text and reply.status == "incomplete"
    assert reply.usage is not None and reply.usage.output_tokens == 8
    with client.responses.stream(input="hello there", **GREEDY) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(pieces) == text


def test_images_are_seen(client: openai.OpenAI) -> None:
    data = encoded(picture(1))
    content: Any = [
        {"type": "input_text", "text": "what is it?"},
        {"type": "input_image", "image_url": data_url(data), "detail": "auto"},
    ]
    reply = client.responses.create(input=[{"role": "user", "content": content}], **GREEDY)
    assert reply.output_text == chat_text(client, asked(image_part(data)))


def test_structure_and_forced_calls_hold(client: openai.OpenAI) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "sum", "schema": SCHEMA, "strict": True}}
    reply = client.responses.create(model="tiny", input="hello", max_output_tokens=256, text=text)
    assert json.loads(reply.output_text)["a"] in (1, 2)
    tools: Any = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}]
    reply = client.responses.create(
        model="tiny", input="hello", max_output_tokens=256, tools=tools, tool_choice={"type": "function", "name": "add"}
    )
    [call] = reply.output
    assert call.type == "function_call" and json.loads(call.arguments)["a"] in (1, 2)


def test_what_is_not_kept_is_said(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="--response-store-bytes"):
        client.responses.create(model="tiny", input="hello", previous_response_id="resp_1")

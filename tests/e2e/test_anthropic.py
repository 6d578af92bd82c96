"""The real Anthropic client against a real server."""

import base64
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.e2e.conftest import IDLE_S
from tests.e2e.pictures import asked, encoded, image_part, picture
from tests.e2e.process import ServerProcess

HELLO: list[Any] = [{"role": "user", "content": "hello there"}]
GREEDY: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "extra_body": {"temperature": 0, "ignore_eos": True}}


@pytest.fixture
def claude(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=IDLE_S) as found:
        yield found


def test_the_answer_is_that_of_chat_completions(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    reply = claude.messages.create(messages=HELLO, **GREEDY)
    chat = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    assert [block.text for block in reply.content if block.type == "text"] == [chat.choices[0].message.content]
    assert reply.stop_reason == "max_tokens" and reply.usage.output_tokens == 8
    with claude.messages.stream(messages=HELLO, **GREEDY) as stream:
        assert "".join(stream.text_stream) == chat.choices[0].message.content
        assert stream.get_final_message().usage.output_tokens == 8


def test_images_are_seen(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    data = encoded(picture(1))
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    content: Any = [{"type": "text", "text": "what is it?"}, {"type": "image", "source": source}]
    reply = claude.messages.create(messages=[{"role": "user", "content": content}], **GREEDY)
    chat = client.chat.completions.create(
        model="tiny", messages=asked(image_part(data)), max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    assert [block.text for block in reply.content if block.type == "text"] == [chat.choices[0].message.content]


def test_a_forced_tool_is_called(claude: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    reply = claude.messages.create(
        model="tiny",
        max_tokens=256,
        messages=HELLO,
        tools=[{"name": "add", "input_schema": schema}],
        tool_choice={"type": "tool", "name": "add"},
    )
    [block] = reply.content
    assert block.type == "tool_use" and block.name == "add" and block.input["a"] in (1, 2), reply
    assert reply.stop_reason == "tool_use"


def test_errors_have_their_classes(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", max_tokens=8, messages=HELLO)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        claude.messages.create(model="tiny", max_tokens=-1, messages=HELLO)

"""litellm: completions, streams and the Responses API."""

from typing import get_args

import litellm

from tests.clients.pictures import CIRCLES, DIGIT, HEART, MODEL, WrittenDigit, asked, data_url

NAME = f"openai/{MODEL}"
SCHEMA = {
    "type": "object",
    "properties": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["digit"],
}

WRITTEN = SCHEMA | {"properties": {"digit": {"enum": list(get_args(WrittenDigit))}}}


def _to(url: str) -> dict[str, object]:
    return {"api_base": f"{url}/v1", "api_key": "none", "temperature": 0, "num_retries": 0}


def check_completion(url: str) -> None:
    reply = litellm.completion(NAME, asked("shapes", CIRCLES), **_to(url))
    assert reply.choices[0].message.content == "2" and reply.usage.prompt_tokens > 49, reply
    shape = {"type": "json_schema", "json_schema": {"name": "digit", "schema": WRITTEN, "strict": True}}
    reply = litellm.completion(NAME, asked("digit", DIGIT), response_format=shape, **_to(url))
    assert reply.choices[0].message.content == '{"digit":"7"}', reply


def check_streaming(url: str) -> None:
    chunks = list(litellm.completion(NAME, asked("heart", HEART), stream=True, **_to(url)))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "purple", chunks


def check_tools(url: str) -> None:
    tools = [{"type": "function", "function": {"name": "report", "parameters": SCHEMA}}]
    reply = litellm.completion(NAME, asked("digit", DIGIT), tools=tools, tool_choice="required", stream=True,
                               parallel_tool_calls=False, **_to(url))  # fmt: skip
    pieces = [call for chunk in reply for call in chunk.choices[0].delta.tool_calls or ()]
    assert pieces[0].function.name == "report", pieces
    assert "".join(piece.function.arguments or "" for piece in pieces).startswith('{"digit":'), pieces


def check_responses(url: str) -> None:
    parts = [{"type": "input_image", "image_url": data_url("digit")}, {"type": "input_text", "text": DIGIT}]
    reply = litellm.responses(model=NAME, input=[{"role": "user", "content": parts}], **_to(url))
    texts = [part.text for item in reply.output for part in item.content]
    assert texts == ["7"], reply

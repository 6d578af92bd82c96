"""langchain-openai: answers, streams, structured output both ways, forced calls, and the Responses API."""

from typing import Annotated, Any

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

from tests.clients.pictures import CIRCLES, DIGIT, HEART, MODEL, WrittenDigit, asked


class Digit(BaseModel):
    """The digit that is seen."""

    digit: Annotated[int, Field(ge=0, le=9)]


class Written(BaseModel):
    """The digit that is seen."""

    digit: WrittenDigit


@tool  # type: ignore[untyped-decorator]
def report(digit: Annotated[int, Field(ge=0, le=9)], is_sure: bool) -> str:
    """Reports a digit."""
    return f"{digit} {is_sure}"


def _chat(url: str, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", temperature=0, max_retries=0, **more)


def _message(picture: str, question: str) -> list[HumanMessage]:
    return [HumanMessage(content=asked(picture, question)[0]["content"])]


def check_invoke(url: str) -> None:
    reply = _chat(url).invoke(_message("digit", DIGIT))
    assert reply.content == "7" and reply.usage_metadata["input_tokens"] > 49, reply


def check_stream(url: str) -> None:
    chunks = list(_chat(url, stream_usage=True).stream(_message("heart", HEART)))
    assert "".join(chunk.content for chunk in chunks) == "purple" and len(chunks) > 2, chunks
    assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) > 0


def check_function_calling(url: str) -> None:
    found = _chat(url).with_structured_output(Digit, method="function_calling").invoke(_message("digit", DIGIT))
    assert isinstance(found, Digit)


def check_json_schema(url: str) -> None:
    found = _chat(url).with_structured_output(Written, method="json_schema").invoke(_message("digit", DIGIT))
    assert found == Written(digit="7"), found


def check_forced_call(url: str) -> None:
    """Without a length limit, so the call must end by itself."""
    model = _chat(url).bind_tools([report], tool_choice="report")
    reply = model.invoke(_message("digit", DIGIT))
    [call] = reply.tool_calls
    assert call["name"] == "report" and not reply.invalid_tool_calls, reply
    assert report.invoke(call["args"]).split()[0] == str(call["args"]["digit"])
    pieces = list(model.stream(_message("digit", DIGIT)))
    texts = [piece["args"] for chunk in pieces for piece in chunk.tool_call_chunks]
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert [found["args"] for found in whole.tool_calls] == [call["args"]] and len(texts) > 3, texts


def check_responses(url: str) -> None:
    chat = _chat(url, use_responses_api=True)
    reply = chat.invoke(_message("shapes", CIRCLES))
    assert reply.text == "2", reply
    model = chat.bind_tools([report], tool_choice="report")
    [call] = model.invoke(_message("digit", DIGIT)).tool_calls
    assert call["name"] == "report" and set(call["args"]) == {"digit", "is_sure"}
    streamed = [chunk.text for chunk in chat.stream(_message("shapes", CIRCLES))]
    assert "".join(streamed) == "2", streamed

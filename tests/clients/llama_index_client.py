"""llama-index: a server with OpenAI's API as its model."""

from typing import Annotated

from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

from tests.clients.pictures import DIGIT, FOLDER, HEART, MODEL


class Digit(BaseModel):
    """The digit that is seen."""

    digit: Annotated[int, Field(ge=0, le=9)]


def _model(url: str) -> OpenAILike:
    return OpenAILike(
        model=MODEL,
        api_base=f"{url}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=1024,
        max_tokens=64,
        temperature=0,
        max_retries=0,
    )


def _message(picture: str, question: str) -> ChatMessage:
    image = ImageBlock(image=(FOLDER / f"{picture}.png").read_bytes(), image_mimetype="image/png")
    return ChatMessage(role="user", blocks=[image, TextBlock(text=question)])


def check_chat(url: str) -> None:
    reply = _model(url).chat([_message("digit", DIGIT)])
    assert reply.message.content == "7", reply


def check_stream(url: str) -> None:
    *_, last = _model(url).stream_chat([_message("heart", HEART)])
    assert last.message.content == "purple", last


def check_structured(url: str) -> None:
    found = _model(url).as_structured_llm(Digit).chat([_message("digit", DIGIT)])
    assert isinstance(found.raw, Digit), found

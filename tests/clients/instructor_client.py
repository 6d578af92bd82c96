"""instructor: a pydantic object in each of its modes."""

from typing import Annotated, Any

import instructor
import openai
from pydantic import BaseModel, Field

from tests.clients.pictures import DIGIT, MODEL, WrittenDigit, asked


class Digit(BaseModel):
    digit: Annotated[int, Field(ge=0, le=9)]


class Written(BaseModel):
    digit: WrittenDigit


class Anything(BaseModel):
    """Of a mode that asks for some JSON object, and tells the schema to the model alone."""

    digit: Any = None


def _ask(url: str, mode: Any, kind: type[BaseModel]) -> Any:
    client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)
    return client.chat.completions.create(
        model=MODEL, messages=asked("digit", DIGIT), response_model=kind, max_retries=0, temperature=0, max_tokens=64
    )


def check_tools(url: str) -> None:
    assert _ask(url, instructor.Mode.TOOLS, Digit).digit in range(10)


def check_json_schema(url: str) -> None:
    assert _ask(url, instructor.Mode.JSON_SCHEMA, Written).digit == "7"


def check_json(url: str) -> None:
    assert isinstance(_ask(url, instructor.Mode.JSON, Anything), Anything)

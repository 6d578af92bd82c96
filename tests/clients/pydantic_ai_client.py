"""pydantic-ai: agents with an output type, and one with a tool."""

from typing import Annotated, Any

from pydantic import BaseModel, Field
from pydantic_ai import Agent, BinaryContent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.pictures import DIGIT, FOLDER, MODEL, WrittenDigit


class Digit(BaseModel):
    """The digit that is seen."""

    digit: Annotated[int, Field(ge=0, le=9)]


class Written(BaseModel):
    """The digit that is seen."""

    digit: WrittenDigit


PICTURE = [BinaryContent((FOLDER / "digit.png").read_bytes(), media_type="image/png"), DIGIT]
SETTINGS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 64, "parallel_tool_calls": False}


def _model(url: str) -> Any:
    return OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))


def check_text(url: str) -> None:
    found = Agent(_model(url), model_settings=SETTINGS).run_sync(PICTURE)
    assert found.output == "7" and found.usage.input_tokens > 49, found


def check_output_type(url: str) -> None:
    native = Agent(_model(url), output_type=NativeOutput(Written), model_settings=SETTINGS).run_sync(PICTURE)
    assert native.output == Written(digit="7"), native
    called = Agent(_model(url), output_type=ToolOutput(Digit), model_settings=SETTINGS).run_sync(PICTURE)
    assert isinstance(called.output, Digit), called


def check_tool(url: str) -> None:
    """The model is too small to choose: it is made to use the tool first and then to answer."""
    seen: list[int] = []

    def settings(context: Any) -> dict[str, Any]:
        return SETTINGS | ({"tool_choice": ["certainty"]} if context.run_step == 1 else {})

    async def once(context: Any, definition: Any) -> Any:
        return definition if context.run_step == 1 else None

    agent = Agent(_model(url), output_type=ToolOutput(Digit), model_settings=settings, retries=0)

    @agent.tool_plain(prepare=once)  # type: ignore[untyped-decorator]
    def certainty(percent: Annotated[int, Field(ge=0, le=100)]) -> str:
        """How sure one may be."""
        seen.append(percent)
        return f"{percent} %"

    found = agent.run_sync(PICTURE)
    assert isinstance(found.output, Digit) and len(seen) == 1, found

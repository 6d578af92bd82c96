"""The official clients connected to an app without a socket, and scripts for its engine."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import anthropic
import httpx2
import openai

from saccade.server.app import build_app
from saccade.server.service import Service
from tests.server.fake import HANG_S, Script

T = TypeVar("T")


def saying(text: str, *, step: int = 3, finish: str = "stop", stop_reason: str | int | None = None) -> Script:
    """Says a text a few characters at a time."""

    async def script(prompt: Any, params: Any) -> AsyncGenerator[dict[str, Any], None]:
        for at in range(0, len(text), step):
            yield {"text": text[at : at + step], "token_ids": (5,)}
        yield {"finish_reason": finish, "stop_reason": stop_reason}

    return script


def with_anthropic(service: Service, use: Callable[[anthropic.AsyncAnthropic], Awaitable[T]], key: str = "none") -> T:
    async def run() -> T:
        async with _http(service) as http:
            client = anthropic.AsyncAnthropic(
                api_key=key, base_url="http://localhost", http_client=http, max_retries=0, timeout=HANG_S
            )
            return await use(client)

    return asyncio.run(run())


def with_openai(service: Service, use: Callable[[openai.AsyncOpenAI], Awaitable[T]]) -> T:
    async def run() -> T:
        async with _http(service) as http:
            client = openai.AsyncOpenAI(
                api_key="none", base_url="http://localhost/v1", http_client=http, max_retries=0, timeout=HANG_S
            )
            return await use(client)

    return asyncio.run(run())


def _http(service: Service) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app=build_app(service)))

"""Limits on bodies, and clients that leave at any stage."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import orjson
import pytest

from saccade.inputs.processor import Processor
from saccade.server.service import Service
from tests.server.fake import HANG_S, Answer, Caller, FakeEngine, service_for

CHAT = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "hi"}]
JSON = {"content-type": "application/json"}
Scripted = Callable[..., tuple[Caller, FakeEngine, Service]]


async def forever(prompt: Any, params: Any) -> AsyncGenerator[dict[str, Any], None]:
    yield {"text": "a", "token_ids": (5,)}
    await asyncio.sleep(1000)


async def never(prompt: Any, params: Any) -> AsyncGenerator[dict[str, Any], None]:
    await asyncio.sleep(1000)
    yield {}


def body(**more: Any) -> bytes:
    return orjson.dumps({"messages": HELLO, **more})


@pytest.mark.parametrize("script", [forever, never])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(scripted: Scripted, script: Any, stream: bool) -> None:
    caller, engine, service = scripted(script)

    async def run() -> None:
        gone, answer = asyncio.Event(), Answer()
        call = asyncio.create_task(caller.call("POST", CHAT, body(stream=stream), JSON, gone=gone, answer=answer))
        while not engine.running:
            await asyncio.sleep(0.01)
        assert service.admission.inside == 1
        gone.set()
        await asyncio.wait_for(call, HANG_S)
        assert not engine.running and service.is_idle and not answer.is_complete
        assert len(asyncio.all_tasks()) == 1, "no task is left behind"

    asyncio.run(run())


def test_a_client_that_leaves_while_media_are_fetched_ends_the_fetch(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller, engine, service = scripted()
    state: list[str] = []

    async def resolve(messages: Any, hold: Any) -> Any:
        state.append("fetching")
        try:
            await asyncio.sleep(1000)
        finally:
            state.append("cancelled")

    monkeypatch.setattr(service.media, "resolve", resolve)
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://a.example/b"}}]}]

    async def run() -> None:
        gone = asyncio.Event()
        call = asyncio.create_task(caller.call("POST", CHAT, body(messages=messages), JSON, gone=gone))
        async with asyncio.timeout(HANG_S):
            while not state:
                await asyncio.sleep(0.01)
        gone.set()
        await asyncio.wait_for(call, HANG_S)
        assert state == ["fetching", "cancelled"] and service.is_idle and not engine.seen

    asyncio.run(run())


def test_a_client_that_leaves_while_sending_its_body_is_forgotten(scripted: Scripted) -> None:
    caller, engine, service = scripted()

    async def run() -> None:
        gone, answer = asyncio.Event(), Answer()
        gone.set()
        await caller.call("POST", CHAT, [b'{"messa'], JSON, gone=gone, answer=answer, is_endless=True)
        assert service.is_idle and not engine.seen and answer.status == 0

    asyncio.run(run())


def test_body_size_is_checked_as_parts_arrive(processor: Processor) -> None:
    service = service_for(FakeEngine(processor), max_body_bytes=5000)
    caller = Caller(service)

    async def run() -> None:
        parts = [b" " * 1000] * 50
        found = await caller.call("POST", CHAT, parts, JSON)
        assert found.status == 413 and found.json["error"]["code"] == "body_too_large"
        said = await caller.call("POST", CHAT, [], JSON | {"content-length": "999999"}, is_endless=True)
        assert said.status == 413
        for odd in ("-1", "abc", "9" * 40):
            assert (await caller.call("POST", CHAT, body(), JSON | {"content-length": odd})).status == 200
        assert service.is_idle

    asyncio.run(run())


def test_a_body_that_never_ends_times_out(processor: Processor) -> None:
    service = service_for(FakeEngine(processor), body_timeout_s=0.05)

    async def run() -> None:
        found = await Caller(service).call("POST", CHAT, [b"{"], JSON, is_endless=True)
        assert found.status == 408 and found.json["error"]["code"] == "body_timeout" and service.is_idle

    asyncio.run(run())


def test_a_full_server_refuses_before_it_reads_the_body(processor: Processor) -> None:
    service = service_for(FakeEngine(processor, never), max_reading_requests=1)
    caller = Caller(service)

    async def run() -> None:
        gone = asyncio.Event()
        first = asyncio.create_task(caller.call("POST", CHAT, [b"{"], JSON, gone=gone, is_endless=True))
        async with asyncio.timeout(HANG_S):
            while not service.admission.reading:
                await asyncio.sleep(0.01)
        found = await caller.call("POST", CHAT, [], JSON, is_endless=True)  # its body never arrives
        assert found.status == 503 and found.json["error"]["code"] == "queue_full" and found.headers["retry-after"]
        gone.set()
        await first
        assert service.is_idle and service.admission.num_refused == 1

    asyncio.run(run())


def test_incomplete_bodies_count_as_memory(processor: Processor) -> None:
    service = service_for(FakeEngine(processor), max_pending_bytes=1024)
    caller = Caller(service)

    async def run() -> None:
        gone = asyncio.Event()
        parts = [b" " * 600]
        slow = asyncio.create_task(caller.call("POST", CHAT, parts, JSON, gone=gone, is_endless=True))
        async with asyncio.timeout(HANG_S):
            while service.admission.pending_bytes != 600:
                await asyncio.sleep(0.01)
        found = await caller.call("POST", CHAT, b" " * 600, JSON)
        assert found.status == 503 and "retry-after" in found.headers
        gone.set()
        await asyncio.wait_for(slow, HANG_S)

    asyncio.run(run())
    assert service.admission.pending_bytes == 0 and service.is_idle


def test_compressed_bodies_are_refused(scripted: Scripted) -> None:
    caller, _, _ = scripted()
    for coding, status in (("gzip", 415), ("br", 415), ("identity", 200)):
        found = asyncio.run(caller.call("POST", CHAT, body(), {**JSON, "content-encoding": coding}))
        assert found.status == status


@pytest.mark.parametrize("depth", [60, 200, 700, 950, 1000, 1015, 5000])
@pytest.mark.parametrize(
    "fields",
    [
        b'"chat_template_kwargs":{"a":%s}',
        b'"tools":[{"type":"function","function":{"name":"f","parameters":{"a":%s}}}]',
        b'"response_format":{"type":"json_schema","json_schema":{"name":"n","schema":{"a":%s}}}',
        b'"messages":[{"role":"user","content":%s}]',
        b'"messages":[{"role":"assistant","content":"","tool_calls":[{"function":{"name":"f","arguments":{"a":%s}}}]}]',
        b'"documents":%s',
        b'"nobody_knows":%s',
    ],
)
def test_deeply_nested_bodies_are_answered(scripted: Scripted, fields: bytes, depth: int) -> None:
    caller, _, _ = scripted()
    messages = b"" if b"messages" in fields else b'"messages":[{"role":"user","content":"hi"}],'
    deep = b"{" + messages + fields % (b"[" * depth + b"]" * depth) + b"}"
    found = asyncio.run(caller.call("POST", CHAT, deep, JSON))
    assert found.status == 400 or (found.status == 200 and (b"nobody" in fields or depth == 60))


def test_a_body_that_exceeds_the_memory_limit_is_refused(processor: Processor) -> None:
    service = service_for(FakeEngine(processor), max_pending_bytes=2000)

    async def run() -> None:
        found = await Caller(service).post(CHAT, body(user="x" * 3000))
        assert found.status == 413 and found.json["error"]["code"] == "request_too_large", "it could never be accepted"
        assert service.admission.pending_bytes == 0
        assert (await Caller(service).post(CHAT, body())).status == 200

    asyncio.run(run())

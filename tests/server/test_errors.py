"""Error replies: one envelope, our own texts, a status that says whether to retry."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from saccade.errors import CapacityError, EngineDeadError, RankGoneError, RequestError
from saccade.server.http_errors import to_http
from saccade.server.service import Service
from saccade.wire.update import NO_NUMBERS, NO_TOKEN
from tests.server.fake import Caller, FakeEngine, Script, service_for

CHAT = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "hi"}]
Scripted = Callable[..., tuple[Caller, FakeEngine, Service]]


def raising(error: Exception, after: int = 0) -> Script:
    async def script(prompt: Any, params: Any) -> AsyncGenerator[dict[str, Any], None]:
        for _ in range(after):
            yield {"text": "a", "token_ids": (5,)}
        raise error

    return script


def ending(reason: str, detail: Any = None) -> Script:
    async def script(prompt: Any, params: Any) -> AsyncGenerator[dict[str, Any], None]:
        yield {"text": "a", "token_ids": (5,)}
        yield {"finish_reason": reason, "stop_reason": detail}

    return script


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestError("x", param="p", code="c"), 400, "c"),
        (RequestError("x", status=413, code="image_too_large"), 413, "image_too_large"),
        (CapacityError("full", retry_after_s=2.2), 503, "queue_full"),
        (EngineDeadError("the engine died: SECRET"), 503, "engine_dead"),
        (TimeoutError(), 408, "deadline_exceeded"),
        (ValueError("SECRET /etc/passwd 0x7ffe"), 500, "internal_error"),
        (MemoryError("SECRET"), 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_before_the_answer_set_the_status(
    scripted: Scripted, error: Exception, status: int, code: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caller, _, service = scripted(raising(error))
    with caplog.at_level(logging.CRITICAL):
        found = asyncio.run(caller.post(CHAT, {"messages": HELLO, "stream": stream}))
    assert found.status == status and found.json["error"]["code"] == code
    assert found.json["error"].keys() == {"message", "type", "param", "code"} and b"SECRET" not in found.body
    assert found.headers["x-request-id"] and service.is_idle
    assert ("retry-after" in found.headers) == (status == 503)
    if status == 500:
        assert (
            found.headers["x-should-retry"] == "false"
            and found.headers["x-request-id"] in found.json["error"]["message"]
        )


def test_clients_learn_which_rank_is_gone(scripted: Scripted) -> None:
    caller, _, _ = scripted(raising(RankGoneError("the engine died: rank 1 of 2 was ended by SIGKILL"), after=2))
    found = asyncio.run(caller.post(CHAT, {"messages": HELLO, "stream": True}))
    assert found.events[-2]["error"]["message"] == "the engine died: rank 1 of 2 was ended by SIGKILL"


@pytest.mark.parametrize("error", [ValueError("SECRET"), EngineDeadError("SECRET")])
def test_an_error_within_a_stream_ends_it_with_an_error_chunk(
    scripted: Scripted, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    caller, _, service = scripted(raising(error, after=2))
    with caplog.at_level("ERROR", "saccade.server"):
        found = asyncio.run(caller.post(CHAT, {"messages": HELLO, "stream": True}))
    is_unknown = isinstance(error, ValueError)
    assert is_unknown == any(record.exc_info for record in caplog.records), "the log has what the client is not told"
    assert found.status == 200 and found.events[-1] == "[DONE]" and found.is_complete
    assert found.events[-2]["error"]["message"] and b"SECRET" not in found.body and service.is_idle


@pytest.mark.parametrize(
    ("reason", "detail", "status", "retry"),
    [
        ("error", NO_NUMBERS, 500, "false"),
        ("error", "the step failed: X", 500, "true"),
        ("deadline", None, 408, "false"),
        ("error", NO_TOKEN, 400, None),
    ],
)
def test_failed_outputs_are_errors(
    scripted: Scripted, reason: str, detail: Any, status: int, retry: str | None
) -> None:
    caller, _, _ = scripted(ending(reason, detail))
    found = asyncio.run(caller.post(CHAT, {"messages": HELLO}))
    assert found.status == status and found.headers.get("x-should-retry") == retry
    streamed = asyncio.run(caller.post(CHAT, {"messages": HELLO, "stream": True}))
    assert "error" in streamed.events[-2] and streamed.events[-1] == "[DONE]"


def test_a_manual_abort_is_a_finish_reason_and_one_at_shutdown_an_error(scripted: Scripted) -> None:
    caller, _, service = scripted(ending("abort"))
    found = asyncio.run(caller.post(CHAT, {"messages": HELLO}))
    assert found.status == 200 and found.json["choices"][0]["finish_reason"] == "abort"

    async def script(prompt: Any, params: Any) -> AsyncGenerator[dict[str, Any], None]:
        yield {"text": "a", "token_ids": (5,)}
        service.drain()
        yield {"finish_reason": "abort"}

    caller, _, service = scripted(script)
    found = asyncio.run(caller.post(CHAT, {"messages": HELLO}))
    assert found.status == 503 and found.json["error"]["code"] == "shutting_down"


def test_health_and_readiness_follow_the_phase(engine: FakeEngine) -> None:
    service = service_for(None)
    caller = Caller(service)

    async def statuses() -> list[int]:
        paths = [await caller.get("/health"), await caller.get("/ready"), await caller.post(CHAT, {"messages": HELLO})]
        return [found.status for found in paths]

    async def run() -> None:
        assert await statuses() == [200, 503, 503]
        service.open(engine, service_for(engine).defaults)  # type: ignore[arg-type]
        assert await statuses() == [200, 200, 200]
        engine.is_alive, engine.death = False, "the engine died: rank 1 of 2 was ended by SIGKILL"
        assert await statuses() == [503, 503, 503]
        for found in (await caller.get("/health"), await caller.post(CHAT, {"messages": HELLO})):
            assert found.json["error"]["message"] == engine.death
        engine.is_alive = True
        service.drain()
        assert await statuses() == [200, 503, 503]
        assert (await caller.get("/metrics")).status == 200

    asyncio.run(run())


def test_a_degraded_engine_is_alive_and_ready(engine: FakeEngine) -> None:
    caller = Caller(service_for(engine))

    async def run() -> None:
        assert (await caller.get("/health")).json == {"status": "ok"}
        engine.degraded.append("a graph is out of service")
        found = await caller.get("/health")
        assert found.status == 200
        assert found.json == {"status": "degraded", "reasons": ["a graph is out of service"]}
        assert (await caller.get("/ready")).status == 200

    asyncio.run(run())


def test_details_of_unknown_errors_are_not_revealed() -> None:
    found = to_http(RuntimeError("SECRET"), "id-1")
    assert "SECRET" not in str(found.envelope()) and "id-1" in str(found) and found.status == 500


class PanicException(BaseException):
    """What libraries in Rust raise when they panic."""


def test_a_panic_in_a_library_becomes_an_ordinary_error(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    service = service_for(engine)
    caller = Caller(service)

    def panic(*given: Any, **more: Any) -> Any:
        raise PanicException("index out of bounds: SECRET")

    async def run() -> None:
        for owner, name in ((engine.processor, "chat"), (engine, "generate")):
            with monkeypatch.context() as patched:
                patched.setattr(owner, name, panic)
                found = await caller.post(CHAT, {"messages": HELLO})
                assert found.status == 500 and found.json["error"]["code"] == "internal_error", found.body
                assert b"SECRET" not in found.body
            assert (await caller.post(CHAT, {"messages": HELLO})).status == 200
        assert service.is_idle

    asyncio.run(run())


def test_errors_about_unknown_routes_and_models_list_the_known_ones(engine: FakeEngine) -> None:
    caller = Caller(service_for(engine, served_model_name=("one", "two")))

    async def run() -> None:
        missing = await caller.post("/v1/embedings", {})
        assert missing.status == 404 and missing.json["error"]["code"] == "unknown_route"
        text = missing.json["error"]["message"]
        assert "no route /v1/embedings;" in text and "/v1/chat/completions" in text and "/health" in text
        wrong = await caller.get(CHAT)
        assert wrong.status == 405 and wrong.headers["allow"] == "POST"
        assert f"the route {CHAT} takes POST, not GET" in wrong.json["error"]["message"]
        model = await caller.post(CHAT, {"model": "three", "messages": [{"role": "user", "content": "hi"}]})
        assert model.status == 404 and model.json["error"]["code"] == "model_not_found"
        assert model.json["error"]["message"] == "the model three is not served here; the server has one, two"
        for odd in ("/" + "a" * 1000, "/\x1b[31m", "/\u202e"):
            text = (await caller.get(odd)).json["error"]["message"]
            assert text.startswith("there is no route with this name;"), text

    asyncio.run(run())

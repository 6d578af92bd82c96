"""GET /health_generate: the engine produces a token, or the reply says why not."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from saccade.errors import CapacityError
from saccade.inputs.placeholders import Prompt
from saccade.server.operators import health
from saccade.server.service import Service
from saccade.wire.sampling_params import SamplingParams
from tests.server.fake import HANG_S, Caller, FakeEngine, service_for

Scripted = Callable[..., tuple[Caller, FakeEngine, Service]]
Said = AsyncGenerator[dict[str, Any], None]
PATH = "/health_generate"


async def one_token(prompt: Prompt, params: SamplingParams) -> Said:
    yield {"text": "a", "token_ids": (5,), "finish_reason": "length"}


async def nothing(prompt: Prompt, params: SamplingParams) -> Said:
    await asyncio.Event().wait()
    yield {}


async def failing(prompt: Prompt, params: SamplingParams) -> Said:
    yield {"finish_reason": "error", "stop_reason": "the step failed"}


async def full(prompt: Prompt, params: SamplingParams) -> Said:
    if params.max_tokens == 1:
        raise CapacityError("full")
    yield {}


def test_the_engine_is_asked_for_one_token(scripted: Scripted) -> None:
    caller, engine, service = scripted(one_token)
    found = asyncio.run(caller.get(PATH))
    assert (found.status, found.json) == (200, {"status": "ok"})
    [(prompt, params, terms)] = engine.seen
    assert len(prompt) == 1 and (params.max_tokens, params.temperature, params.ignore_eos) == (1, 0, True)
    assert terms.turn.priority < 0 and service.is_idle and not engine.running


def test_an_engine_that_only_embeds_is_asked_for_a_vector(scripted: Scripted) -> None:
    async def one_vector(prompt: Prompt, params: SamplingParams) -> Said:
        yield {"pooled": np.ones(4, dtype=np.float32), "finish_reason": "length"}

    caller, engine, _ = scripted(one_vector)
    engine.ready = replace(engine.ready, has_head=False)
    assert asyncio.run(caller.get(PATH)).status == 200
    [(_, params, _)] = engine.seen
    assert (params.pooling, params.max_tokens) == ("last", 0)


def test_a_recent_token_needs_no_probe(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "RECENT_S", HANG_S)
    caller, engine, _ = scripted(one_token)

    async def run() -> None:
        await caller.post("/v1/completions", {"prompt": "a"})
        assert (await caller.get(PATH)).status == 200
        await asyncio.gather(*(caller.get(PATH) for _ in range(5)))

    asyncio.run(run())
    assert len(engine.seen) == 1, "the completion's token was enough"


def test_concurrent_callers_share_a_probe(scripted: Scripted) -> None:
    caller, engine, _ = scripted(one_token)

    async def run() -> list[int]:
        return [found.status for found in await asyncio.gather(*(caller.get(PATH) for _ in range(5)))]

    assert asyncio.run(run()) == [200] * 5 and len(engine.seen) == 1


def test_an_engine_that_produces_nothing_is_unhealthy(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "LIMIT_S", 0.2)
    caller, engine, _ = scripted(nothing)
    found = asyncio.run(caller.get(PATH))
    assert (found.status, found.json["error"]["code"]) == (503, "unhealthy")
    assert "no token within 0.2 s" in found.json["error"]["message"] and not engine.running
    caller, _, _ = scripted(failing)
    found = asyncio.run(caller.get(PATH))
    assert (found.status, found.json["error"]["code"]) == (503, "unhealthy")


def test_with_a_full_queue_tokens_of_others_count(scripted: Scripted) -> None:
    caller, _, service = scripted(full)

    async def run() -> int:
        asked = asyncio.create_task(caller.get(PATH))
        await asyncio.sleep(3 * health.POLL_S)
        assert not asked.done()
        service.note_output()
        return (await asked).status

    assert asyncio.run(run()) == 200


def test_a_server_that_accepts_no_requests_does_not_probe(engine: FakeEngine) -> None:
    starting, draining = service_for(None), service_for(engine)
    draining.drain()
    for service, code in ((starting, "starting"), (draining, "shutting_down")):
        found = asyncio.run(Caller(service).get(PATH))
        assert (found.status, found.json["error"]["code"]) == (503, code)
    assert not engine.seen

"""Health reports saturated and stuck parts, and a dead engine is restarted."""

import asyncio
import gc
import io
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from saccade.client import back_off as back_off_module
from saccade.client import liveness
from saccade.client.back_off import MAX_TRIES, STEADY_S, BackOff
from saccade.client.liveness import Liveness
from saccade.client.process import AsyncEngine
from saccade.errors import ConfigError, EngineDeadError
from saccade.jobs import fair_threads
from saccade.server import front_end, service
from saccade.server.lifecycle import Launch, Stages, restart
from saccade.server.server_settings import ServerSettings
from saccade.server.service import ServerPhase
from tests.inputs.folders import write_qwen
from tests.server.fake import HANG_S, Caller, FakeEngine, service_for

Scripted = Callable[..., tuple[Caller, FakeEngine, Any]]
CHAT, HELLO = "/v1/chat/completions", [{"role": "user", "content": "hi"}]


def test_restarts_stop_after_some_tries_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    back_off = BackOff(lambda: now)
    delays = [back_off.next_delay_s() for _ in range(MAX_TRIES + 1)]
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, None]
    back_off.note_death()
    assert back_off.next_delay_s() is None, "it did not live long"
    now += STEADY_S
    back_off.note_death()
    assert back_off.next_delay_s() == 1.0

    async def start() -> str:
        nonlocal now
        now += 10 * STEADY_S
        return "an engine"

    monkeypatch.setattr(back_off_module, "FIRST_DELAY_S", 0.0)
    assert asyncio.run(back_off.restarted(start, "the engine")) == "an engine"
    back_off.note_death()
    left = [back_off.next_delay_s() for _ in range(MAX_TRIES - 1)]
    assert left.count(None) == 1, "a slow start is no long life: its two tries count"


@pytest.fixture
def plan(tmp_path: Path) -> Launch:
    return Launch(str(write_qwen(tmp_path)))


@pytest.mark.parametrize("num_failures", [0, 2, MAX_TRIES])
def test_a_dead_engine_is_replaced(
    engine: FakeEngine, plan: Launch, monkeypatch: pytest.MonkeyPatch, num_failures: int
) -> None:
    made = service_for(engine, restart_engine=True)
    caller, starts = Caller(made), list[int]()

    async def start(folder: Path, *settings: Any, processor: Any, **how: Any) -> FakeEngine:
        starts.append(1)
        health = await caller.get("/health")
        assert health.status == 200 and "restarted" in health.json["reasons"][0]
        assert (await caller.post(CHAT, {"messages": HELLO})).json["error"]["code"] == "starting"
        if len(starts) <= num_failures:
            raise ConfigError("not yet")
        return FakeEngine(processor)

    monkeypatch.setattr(AsyncEngine, "start", start)
    monkeypatch.setattr(back_off_module, "FIRST_DELAY_S", 0.0)

    async def run() -> None:
        engine.is_alive = False
        assert made.phase is ServerPhase.DEAD and (await caller.get("/health")).status == 503
        made.revive()
        found = await restart(made, plan, BackOff(), Stages(lambda text: None, "", 0.0))
        if num_failures == MAX_TRIES:
            assert found is None and made.phase is ServerPhase.DEAD and len(starts) == MAX_TRIES
            assert (await caller.get("/health")).status == 503
            return
        assert found is not None and (await caller.get("/health")).json == {"status": "ok"}
        assert (await caller.post(CHAT, {"messages": HELLO})).status == 200

    asyncio.run(run())


def test_a_restart_that_breaks_ends_the_server_with_its_error(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def started(*given: Any) -> FakeEngine:
        return engine

    async def breaks(*given: Any) -> None:
        raise ValueError("odd")

    async def dies() -> str:
        return "gone"

    monkeypatch.setattr(front_end, "start", started)
    monkeypatch.setattr(front_end, "restart", breaks)
    monkeypatch.setattr(engine, "wait_dead", dies)
    front = front_end._Front(ServerSettings(restart_engine=True), Launch("m"), Console(file=io.StringIO()))
    config = front.config()
    config.load()
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(ValueError, match="odd"):
            asyncio.run(asyncio.wait_for(front.run(config, listener), HANG_S))
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("restarts", [False, True])
def test_requests_of_a_dead_engine_end_with_a_reason(scripted: Scripted, restarts: bool) -> None:
    async def dies(prompt: Any, params: Any) -> AsyncGenerator[dict[str, Any], None]:
        yield {"text": "a", "token_ids": (5,)}
        raise EngineDeadError("the engine died: secret details")

    caller, _, _ = scripted(dies, restart_engine=restarts)
    found = asyncio.run(caller.post(CHAT, {"messages": HELLO}))
    assert found.status == 503 and found.json["error"]["code"] == "engine_dead" and "secret" not in found.body.decode()
    assert ("is being restarted" in found.json["error"]["message"]) == restarts


def test_a_stuck_queue_degrades_health(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    caller, _, made = scripted(preprocess_threads=1)
    is_free, is_begun = threading.Event(), threading.Event()
    later = [0.0]
    monkeypatch.setattr(fair_threads, "monotonic", lambda: time.monotonic() + later[0])

    def held() -> None:
        is_begun.set()
        assert is_free.wait(60)

    async def run() -> None:
        first = asyncio.create_task(made.workers.in_thread("", held))
        assert await asyncio.to_thread(is_begun.wait, 60)
        second = asyncio.create_task(made.workers.in_thread("", lambda: None))
        await asyncio.sleep(0)
        later[0] = service.SATURATED_S + 1
        found = (await caller.get("/health")).json
        assert found["status"] == "degraded" and "to be prepared" in found["reasons"][0]
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        assert (await caller.get("/health")).json == {"status": "ok"}, "a cancelled request no longer waits"
        is_free.set()
        await first

    asyncio.run(run())


def test_media_that_wait_long_degrade_health(engine: FakeEngine) -> None:
    made = service_for(engine)
    made.media_pool = cast(Any, SimpleNamespace(pool=SimpleNamespace(oldest_s=service.SATURATED_S + 1)))
    reasons = ["media wait 6 seconds to be decoded"]
    assert asyncio.run(Caller(made).get("/health")).json == {"status": "degraded", "reasons": reasons}


def test_a_silent_engine_with_work_is_in_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(liveness, "monotonic", lambda: now[0])
    found = Liveness()
    now[0] += liveness.STALLED_S + 1
    assert not found.troubles(has_work=False) and "not finished a step" in found.troubles(has_work=True)[0]
    found.note_message()
    assert not found.troubles(has_work=True)
    found.note_compiling(liveness.COMPILING_S + 1)
    assert "grammars" in found.troubles(has_work=True)[0] and not found.troubles(has_work=False)
    found.faults.append("a graph is wrong")
    assert found.troubles(has_work=False) == ["a graph is wrong"]

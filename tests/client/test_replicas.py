"""Several engines as one: which requests go where, and what happens when an engine dies."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from random import randrange

import pytest

from saccade.client import back_off
from saccade.client.replicas import Replicas, devices_of
from saccade.client.stream import Delta
from saccade.errors import CapacityError, ConfigError, EngineDeadError, RequestError
from saccade.inputs.placeholders import Prompt, text_prompt
from saccade.inputs.processor import Processor
from saccade.routing import ConsistentHashing, RoundRobin
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.turn import USUAL, Terms
from tests.inputs.folders import write_qwen
from tests.server.fake import HANG_S, Caller, FakeEngine, service_for, two_words

ROOM = 10**6
PARAMS = SamplingParams(max_tokens=2)


class Mortal(FakeEngine):
    """An engine that can be killed; its requests then end with an error, as with AsyncEngine."""

    def __init__(self, processor: Processor) -> None:
        super().__init__(processor, two_words)
        self.is_dead = asyncio.Event()
        self.may_begin, self.may_end = asyncio.Event(), asyncio.Event()
        self.may_begin.set()
        self.may_end.set()
        self.refusal: CapacityError | None = None
        self.is_closed = False
        self.asked: list[str] = []  # ids of all requests received

    async def generate(
        self, request_id: str, prompt: Prompt, params: SamplingParams, terms: Terms = USUAL
    ) -> AsyncGenerator[Delta, None]:
        if self.refusal is not None:
            raise self.refusal
        self.asked.append(request_id)
        async with aclosing(super().generate(request_id, prompt, params, terms)) as source:
            for gate in (self.may_begin, self.may_end):
                await self._passed(gate)
                yield await anext(source)

    async def _passed(self, gate: asyncio.Event) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in (gate, self.is_dead)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if self.is_dead.is_set():
            raise EngineDeadError("the engine died: killed")

    async def wait_dead(self) -> str:
        await self.is_dead.wait()
        return "killed"

    async def aclose(self) -> None:
        self.is_closed = True
        self.is_dead.set()


class Rig:
    """Replicas of engines that are `started` in order; `failures` says how many further starts fail."""

    def __init__(self, processor: Processor, count: int) -> None:
        self.processor, self.count = processor, count
        self.started: list[Mortal] = []
        self.failures = 0
        self.failure: Exception = ConfigError("not now")

    async def start_one(self) -> Mortal:
        if len(self.started) >= self.count and self.failures:
            self.failures -= 1
            raise self.failure
        self.started.append(Mortal(self.processor))
        return self.started[-1]

    async def open(self) -> Replicas:
        return await Replicas.start([self.start_one] * self.count, lambda ready: ConsistentHashing(room_tokens=ROOM))


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    return Processor.from_folder(write_qwen(tmp_path_factory.mktemp("qwen")))


@pytest.fixture
def run(processor: Processor, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.setattr(back_off, "FIRST_DELAY_S", 0.0)

    def run(test: Callable[[Rig, Replicas], Awaitable[None]], count: int = 3) -> None:
        async def inside() -> None:
            rig = Rig(processor, count)
            replicas = await rig.open()
            try:
                async with asyncio.timeout(HANG_S):
                    await test(rig, replicas)
            finally:
                await replicas.aclose()
            assert all(engine.is_closed for engine in rig.started)

        asyncio.run(inside())

    return run


def some_prompt() -> Prompt:
    return text_prompt([randrange(100) for _ in range(40)])


async def answer(replicas: Replicas, prompt: Prompt, name: str = "r") -> str:
    async with aclosing(replicas.generate(name, prompt, PARAMS)) as deltas:
        return "".join([delta.text async for delta in deltas])


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def test_equal_prefixes_go_to_one_engine_and_all_engines_are_used(run: Callable[..., None]) -> None:
    async def test(rig: Rig, replicas: Replicas) -> None:
        prompts = [some_prompt() for _ in range(40)]
        for prompt in prompts * 2:
            assert await answer(replicas, prompt) == "two words"
        seen = [[id(prompt) for prompt, _, _ in engine.seen] for engine in rig.started]
        assert all(seen) and sum(map(len, seen)) == 80
        assert all(ids[: len(ids) // 2] == ids[len(ids) // 2 :] for ids in seen)
        assert set(replicas.loads.values()) == {0}

    run(test)


def test_a_request_that_has_not_begun_moves_to_another_engine_and_is_answered_once(run: Callable[..., None]) -> None:
    async def test(rig: Rig, replicas: Replicas) -> None:
        for engine in rig.started:
            engine.may_begin.clear()
        task = asyncio.create_task(answer(replicas, some_prompt()))
        await until(lambda: any(engine.asked for engine in rig.started))
        [first] = [engine for engine in rig.started if engine.asked]
        for engine in rig.started:
            engine.may_begin.set() if engine is not first else engine.is_dead.set()
        assert await task == "two words"
        assert sum(len(engine.asked) for engine in rig.started) == 2
        await until(lambda: len(rig.started) == 4 and not replicas.degraded)

    run(test)


def test_a_request_is_moved_only_once(run: Callable[..., None]) -> None:
    async def test(rig: Rig, replicas: Replicas) -> None:
        for engine in rig.started:
            engine.may_begin.clear()
        task = asyncio.create_task(answer(replicas, some_prompt()))
        for num_lost in (1, 2):
            await until(lambda n=num_lost: sum(len(engine.asked) for engine in rig.started[:3]) == n)  # type: ignore[misc]
            for engine in rig.started[:3]:
                if engine.asked:
                    engine.is_dead.set()
        with pytest.raises(EngineDeadError):
            await task

    run(test)


def test_only_streams_of_the_engine_that_died_fail_and_it_is_replaced(run: Callable[..., None]) -> None:
    async def test(rig: Rig, replicas: Replicas) -> None:
        for engine in rig.started:
            engine.may_end.clear()
        sources = [replicas.generate(f"{i}", some_prompt(), PARAMS) for i in range(12)]
        assert [(await anext(source)).text for source in sources] == ["two"] * 12
        lost = rig.started[1]
        num_lost = len(lost.running)
        lost.is_dead.set()
        await until(lambda: bool(replicas.degraded))
        assert "replica 1 of 3 is down; it is being restarted" in replicas.degraded
        for engine in rig.started:
            engine.may_end.set()
        ends = await asyncio.gather(*(anext(source) for source in sources), return_exceptions=True)
        assert sum(isinstance(end, EngineDeadError) for end in ends) == num_lost
        assert sum(isinstance(end, Delta) and end.text == " words" for end in ends) == 12 - num_lost
        for source in sources:
            await source.aclose()
        await until(lambda: not replicas.degraded)
        assert lost.is_closed and len(rig.started) == 4 and set(replicas.loads) == {"0", "1", "2"}
        for _ in range(60):  # one in three goes to the new engine
            assert await answer(replicas, some_prompt()) == "two words"
        assert rig.started[3].seen

    run(test)


def test_requests_are_refused_until_an_engine_is_up_again(run: Callable[..., None]) -> None:
    async def test(rig: Rig, replicas: Replicas) -> None:
        gate = asyncio.Event()
        start_one = rig.start_one

        async def later() -> Mortal:
            await gate.wait()
            return await start_one()

        for replica in replicas._replicas.values():
            replica.start = later
        for engine in rig.started[:]:
            engine.is_dead.set()
        await until(lambda: len(replicas.degraded) == 2)
        assert replicas.is_alive
        with pytest.raises(CapacityError, match="restarted"):
            await answer(replicas, some_prompt())
        with pytest.raises(EngineDeadError):
            await replicas.reports()
        gate.set()
        await until(lambda: not replicas.degraded)
        assert await answer(replicas, some_prompt()) == "two words"

    run(test, count=2)


@pytest.mark.parametrize("failure", [ConfigError("not now"), ValueError("unforeseen")])
def test_an_engine_that_cannot_be_restarted_is_given_up_and_the_last_one_ends_them_all(
    run: Callable[..., None], failure: Exception
) -> None:
    async def test(rig: Rig, replicas: Replicas) -> None:
        rig.failures, rig.failure = 2 * back_off.MAX_TRIES, failure
        rig.started[0].is_dead.set()
        await until(lambda: any("could not" in reason for reason in replicas.degraded))
        assert await answer(replicas, some_prompt()) == "two words"
        states = [replicas.is_alive]
        rig.started[1].is_dead.set()
        assert "all engines died; the last one: killed" in await replicas.wait_dead()
        states.append(replicas.is_alive)
        assert states == [True, False]
        with pytest.raises(EngineDeadError):
            await answer(replicas, some_prompt())

    run(test, count=2)


def test_a_full_engine_passes_requests_on_until_all_are_full(run: Callable[..., None]) -> None:
    async def test(rig: Rig, replicas: Replicas) -> None:
        for engine in rig.started[:2]:
            engine.refusal = CapacityError("full", retry_after_s=7)
        assert await answer(replicas, some_prompt()) == "two words"
        rig.started[2].refusal = CapacityError("full", retry_after_s=7)
        with pytest.raises(CapacityError, match="full"):
            await answer(replicas, some_prompt())

    run(test)


def test_aborts_reach_the_engine_and_an_aborted_request_is_not_moved(run: Callable[..., None]) -> None:
    async def test(rig: Rig, replicas: Replicas) -> None:
        for engine in rig.started:
            engine.may_begin.clear()
        task = asyncio.create_task(answer(replicas, some_prompt(), "mine"))
        await until(lambda: any(engine.asked for engine in rig.started))
        with pytest.raises(RequestError, match="ids must be unique"):
            await answer(replicas, some_prompt(), "mine")
        replicas.abort("mine")
        replicas.abort("unknown")
        [engine] = [engine for engine in rig.started if engine.asked]
        assert engine.aborted == ["mine"]
        engine.is_dead.set()
        with pytest.raises(EngineDeadError):
            await task

    run(test)


def test_closing_a_stream_frees_its_share_of_the_load(run: Callable[..., None]) -> None:
    async def test(rig: Rig, replicas: Replicas) -> None:
        source = replicas.generate("r", some_prompt(), PARAMS)
        await anext(source)
        assert sum(replicas.loads.values()) == 42
        await source.aclose()
        assert sum(replicas.loads.values()) == 0 and not any(engine.running for engine in rig.started)

    run(test)


def test_limits_add_up_except_those_of_one_request(run: Callable[..., None]) -> None:
    async def test(rig: Rig, replicas: Replicas) -> None:
        one, all_ = rig.started[0].ready, replicas.ready
        assert all_.limits.max_num_seqs == 3 * one.limits.max_num_seqs == 12
        assert all_.limits.max_queued_requests == 3 * one.limits.max_queued_requests
        assert all_.limits.max_model_len == one.limits.max_model_len
        assert all_.kv_cache_tokens == 3 * one.kv_cache_tokens
        assert await replicas.flush_cache() and [engine.num_flushes for engine in rig.started] == [1, 1, 1]

    run(test)


def test_if_one_engine_fails_to_start_all_are_closed(processor: Processor) -> None:
    rig = Rig(processor, 2)

    async def fails() -> Mortal:
        await until(lambda: len(rig.started) == 2)
        raise ConfigError("no such model")

    async def start() -> None:
        await Replicas.start([rig.start_one, fails, rig.start_one], lambda ready: RoundRobin())

    with pytest.raises(ConfigError, match="no such model"):
        asyncio.run(start())
    assert all(engine.is_closed for engine in rig.started)


def test_the_server_shows_each_engine_and_what_is_wrong(run: Callable[..., None]) -> None:
    async def test(rig: Rig, replicas: Replicas) -> None:
        caller = Caller(service_for(replicas))
        graphs = (await caller.get("/graphs")).json
        assert set(graphs["engines"]) == {"0", "1", "2"} and graphs["phases"] == graphs["engines"]["0"]["phases"]
        live = (await caller.call("GET", "/live", b"", {}, query=b"engine=1")).json
        assert live["engines"] == ["0", "1", "2"] and live["scheduler"]["running"] == 0
        unknown = await caller.call("GET", "/live", b"", {}, query=b"engine=9")
        assert (unknown.status, unknown.json["error"]["param"]) == (400, "engine")
        traced = await Caller(service_for(replicas, admin_api_key="boss")).get("/trace", authorization="Bearer boss")
        assert (traced.status, traced.json["error"]["code"]) == (400, "several_engines")
        text = (await caller.get("/metrics")).body.decode()
        for name in "012":
            assert f'vllm:iteration_tokens_total_count{{engine="{name}",model_name="m"}} 0.0' in text
            assert f'saccade:num_requests_running{{engine="{name}",model_name="m"}} 0.0' in text
            assert f'saccade:graph_real_tokens_total{{engine="{name}",phase="decode"}} 9.0' in text
        assert text.count("# TYPE saccade:graph_real_tokens_total counter") == 1
        rig.failures = back_off.MAX_TRIES
        rig.started[2].is_dead.set()
        await until(lambda: any("could not" in reason for reason in replicas.degraded))
        found = (await caller.get("/health")).json
        assert found["status"] == "degraded" and "replica 2 of 3 is down" in found["reasons"][0]
        text = (await caller.get("/metrics")).body.decode()
        assert 'engine="1"' in text and 'engine="2"' not in text
        chat = await caller.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
        assert chat.json["choices"][0]["message"]["content"] == "two words"

    run(test)


def test_every_engine_has_its_own_devices() -> None:
    assert devices_of("auto", 1, 4) == ["auto"]
    assert devices_of("auto", 3, 2) == ["auto:0", "auto:2", "auto:4"]
    assert devices_of("cuda:1", 2, 1) == ["cuda:1", "cuda:2"]
    assert devices_of("cpu", 2, 2) == ["cpu", "cpu"]
    assert devices_of("tpu:x", 2, 1) == ["tpu:x", "tpu:x"]

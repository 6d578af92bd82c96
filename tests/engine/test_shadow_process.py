"""Shadow checks in the engine process: they run when it is idle and give way to commands."""

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from socket import socketpair

import numpy as np
import pytest

from saccade.client.process import AsyncEngine
from saccade.execution.worker import Worker
from saccade.scheduling.engine import Engine
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings
from saccade.wire.link import Link
from saccade.wire.messages import Add, AskStats, Close, Degraded, EngineReply, StatsReply, encode, pack_prompt
from saccade.wire.turn import NEXT
from tests.engine.conftest import Loaded
from tests.engine.rig import random_prompt, run
from tests.engine.test_shadow import GREEDY, counts, requests, runner_of, shadowed
from tests.engine.wrong_graphs import spoil_outputs
from tests.models import tiny

Load = Callable[[str], Loaded]
BOUND_S = 300.0
SETTINGS = EngineSettings(
    device="cpu", block_size=8, kv_cache_tokens=1024, encoder_cache_tokens=256, graphs="vision=off", shadow=1.0
)
LIMITS = SchedulerSettings(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=200, encoder_budget_tokens=64)


class Front:
    """The front end of a worker that runs in a thread of this process."""

    def __init__(self, engine: Engine) -> None:
        self.link, self.worker_link = map(Link, socketpair())
        self.told: queue.Queue[EngineReply] = queue.Queue()
        self.worker = Worker(engine, self.worker_link, self.told.put)

    def wait_for(self, kind: type[EngineReply]) -> EngineReply:
        while not isinstance(found := self.told.get(timeout=BOUND_S), kind):
            pass
        return found

    def close(self) -> None:
        self.link.close()
        self.worker_link.close()


@pytest.fixture
def fronts() -> Iterator[Callable[[Engine], Front]]:
    made: list[Front] = []

    def new(engine: Engine) -> Front:
        made.append(Front(engine))
        return made[-1]

    yield new
    for front in made:
        front.close()


def test_a_worker_reports_a_wrong_graph_unasked(
    loaded: Load, fronts: Callable[[Engine], Front], tmp_path: Path
) -> None:
    made, _ = loaded("qwen3_vl")
    engine = shadowed(loaded("qwen3_vl"), tmp_path)
    spoil_outputs(runner_of(engine, "head"))
    front = fronts(engine)
    thread = threading.Thread(target=front.worker.run, daemon=True)
    thread.start()
    head, arrays = pack_prompt(random_prompt(made, np.random.default_rng(1), num_images=1))
    frames = [encode(Add(1, head, GREEDY, NEXT, None, None)), *(array.tobytes() for array in arrays)]
    front.link.send(frames)
    told = front.wait_for(Degraded)
    assert isinstance(told, Degraded) and "head/full" in told.reason and str(tmp_path) in told.note
    front.link.send([encode(AskStats(2))])
    stats = front.wait_for(StatsReply)
    assert isinstance(stats, StatsReply) and stats.phases["head"]["shadow"]["different"] == 1
    front.link.send([encode(Close())])
    thread.join(BOUND_S)
    assert not thread.is_alive()


def test_a_waiting_command_interrupts_a_check(loaded: Load, fronts: Callable[[Engine], Front]) -> None:
    made, _ = loaded("qwen3_vl")
    engine = shadowed(loaded("qwen3_vl"))
    run(engine, *requests(made, 2, seed=1))
    front = fronts(engine)
    front.worker._check_shadow()
    assert counts(engine) == {"equal": 1}
    operations = count()

    def has_command() -> bool:
        if next(operations) == 50:
            front.link.send([encode(AskStats(1))])
            assert front.worker_link.wait(BOUND_S)
        return front.worker._has_command()

    assert engine.idle.check(has_command) is None
    assert counts(engine) == {"equal": 1, "interrupted": 1} and next(operations) == 51
    front.worker._check_shadow()
    assert counts(engine) == {"equal": 1, "interrupted": 1}, "no check starts while a command waits"


async def checks_while_idle(made: tiny.Tiny, caplog: pytest.LogCaptureFixture) -> None:
    async with await AsyncEngine.start(made.folder, SETTINGS, LIMITS) as engine:
        prompt = random_prompt(made, np.random.default_rng(1), length=20)
        ids = [delta.token_ids async for delta in engine.generate("a", prompt, GREEDY)]
        pause_s = 0.5
        while "equal" not in (phases := (await engine.stats()).phases)["decode"]["shadow"]:
            await asyncio.sleep(pause_s)
            pause_s *= 2  # asking for stats interrupts a check
        assert all(phase["shadow"].keys() <= {"equal", "interrupted"} for phase in phases.values())
        assert ids == [delta.token_ids async for delta in engine.generate("b", prompt, GREEDY)]
        assert engine.degraded == []
        engine._hear(Degraded("a graph is wrong", "a graph is wrong, see FILE"))
        assert engine.degraded == ["a graph is wrong"] and "see FILE" in caplog.text and engine.is_alive


def test_a_server_checks_its_replays_while_it_is_idle(made: tiny.Tiny, caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(asyncio.wait_for(checks_while_idle(made, caplog), BOUND_S))

"""How an engine and its worker handle commands that arrive while the device works."""

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from socket import socketpair
from typing import Any

import numpy as np
import pytest

from saccade.execution.worker import Worker
from saccade.inputs.placeholders import text_prompt
from saccade.scheduling import engine as engine_module
from saccade.scheduling.engine import Engine
from saccade.scheduling.executing import StepResult
from saccade.scheduling.orders import Run
from saccade.wire.engine_settings import SchedulerSettings
from saccade.wire.link import Link
from saccade.wire.messages import Add, BeginTrace, Close, Updates, encode, pack_prompt
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.turn import NEXT
from tests.engine.simulated import make_scheduler
from tests.scheduling.fakes import BLOCK_SIZE, MAX_BLOCKS, PAGE_ROWS, RecordingExecutor, make_composer

ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)
PROMPT = text_prompt([5, 6, 7])
LIMITS = SchedulerSettings(
    max_num_seqs=6, max_num_batched_tokens=32, max_model_len=MAX_BLOCKS * BLOCK_SIZE, encoder_budget_tokens=16
)


@dataclass
class SlowTicket:
    """The ticket of a step that runs until `is_over` returns True or somebody waits for it."""

    result: StepResult
    is_over: Callable[[], bool]
    was_waited_for: bool = False

    @property
    def is_done(self) -> bool:
        return self.is_over()

    def wait(self) -> StepResult:
        self.was_waited_for = True
        return self.result


@dataclass
class SlowDevice(RecordingExecutor):
    is_over: Callable[[], bool] = lambda: False
    tickets: list[SlowTicket] = field(default_factory=list)

    def execute(self, orders: Any) -> Any:
        done = super().execute(orders)
        if not isinstance(orders, Run):
            return done
        self.tickets.append(SlowTicket(done.result, self.is_over))
        return self.tickets[-1]


@pytest.fixture(autouse=True)
def _listens_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, an engine could stop listening before a test's commands have come."""
    monkeypatch.setattr(engine_module, "LISTEN_S", 60.0)


def slow_engine(is_over: Callable[[], bool] = lambda: False) -> tuple[Engine, SlowDevice]:
    device = SlowDevice(np.random.default_rng(), is_over=is_over)
    return Engine(device, make_composer(), make_scheduler(LIMITS, block_size=BLOCK_SIZE, page_rows=PAGE_ROWS)), device


def test_a_request_is_launched_behind_the_only_step_that_runs() -> None:
    engine, device = slow_engine()
    engine.add("a", PROMPT, ONE_TOKEN)
    assert engine.step() == []

    def take_commands() -> bool:
        engine.add("b", PROMPT, ONE_TOKEN)
        return True

    assert engine.step(take_commands) == [] and not device.tickets[0].was_waited_for
    [update] = engine.step(lambda: False if device.tickets[0].was_waited_for else _let_end(device))
    assert update.request_id == "a" and len(device.of(Run)) == 2 and not device.tickets[1].was_waited_for
    [update] = engine.step()
    assert update.request_id == "b" and not engine.has_work
    engine.scheduler.check()


def _let_end(device: SlowDevice) -> bool:
    """A request that arrives while two steps run does not keep the first one from ending."""
    device.tickets[0].is_over = lambda: True
    return True


@pytest.mark.parametrize("max_tokens", [1, 4], ids=["one step runs", "two steps run"])
def test_a_request_can_be_aborted_while_its_steps_run(max_tokens: int) -> None:
    engine, device = slow_engine()
    engine.add("a", PROMPT, SamplingParams(temperature=0, max_tokens=max_tokens))
    engine.step()
    updates: list[Any] = []

    def take_commands() -> bool:
        updates.extend(engine.abort("a"))
        return _let_end(device)

    assert engine.step(take_commands) == [] and [update.request_id for update in updates] == ["a"]
    for _ in range(3):
        assert engine.step() == []
    assert all(ticket.was_waited_for for ticket in device.tickets) and not engine.has_work
    engine.scheduler.check()


def test_no_commands_are_taken_while_a_step_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "LISTEN_S", 0.0)
    engine, device = slow_engine()
    engine.add("a", PROMPT, ONE_TOKEN)
    engine.step()
    [update] = engine.step(lambda: pytest.fail("commands were taken"))
    assert update.finish is not None and device.tickets[0].was_waited_for


def test_a_device_that_fails_is_not_polled_forever() -> None:
    def fail() -> bool:
        raise RuntimeError("the device is gone")

    engine, device = slow_engine()
    engine.add("a", PROMPT, ONE_TOKEN)
    engine.step()
    device.tickets[0].is_over = fail
    [update] = engine.step(lambda: True)
    assert update.request_id == "a" and device.tickets[0].was_waited_for


@pytest.fixture
def links() -> Iterator[tuple[Link, Link]]:
    """A worker's and a front end's."""
    worker, front = map(Link, socketpair())
    yield worker, front
    front.close()
    worker.close()


def test_a_worker_launches_a_burst_in_one_step(links: tuple[Link, Link]) -> None:
    """The first step ends only after another one was launched behind it."""
    link, front = links
    replies: queue.Queue[Any] = queue.Queue()
    looks = count()

    def is_over() -> bool:
        if next(looks) == 1:  # not right after the launch, but when the engine can only wait
            for serial in (2, 3, 4):
                send(serial)
        return len(device.tickets) > 1

    def send(serial: int) -> None:
        head, arrays = pack_prompt(PROMPT)
        front.send([encode(Add(serial, head, ONE_TOKEN, NEXT, None, None)), *(array.data for array in arrays)])

    def tell(reply: Any) -> None:
        replies.put(reply)
        ends.extend(news.serial for news in reply.news if news.finish is not None)
        if len(ends) == 4:
            front.send([encode(Close())])

    ends: list[int] = []
    engine, device = slow_engine(is_over)
    send(1)
    Worker(engine, link, tell).run()
    assert sorted(ends) == [1, 2, 3, 4] and isinstance(replies.get(), Updates)
    assert [one.num_sampled for one in device.of(Run)] == [1, 3]


def test_an_idle_worker_ends_a_trace_at_its_time_limit(
    links: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    link, front = links
    engine, _ = slow_engine(lambda: True)
    end = engine.end_trace

    def end_and_close() -> Any:
        front.send([encode(Close())])  # no command arrived before
        return end()

    monkeypatch.setattr(engine, "end_trace", end_and_close)
    front.send([encode(BeginTrace(1, limit_s=0.02))])
    worker = threading.Thread(target=Worker(engine, link, lambda reply: None).run, daemon=True)
    worker.start()
    worker.join(60)
    was_closed = not worker.is_alive()
    front.send([encode(Close())])
    worker.join(60)
    assert was_closed

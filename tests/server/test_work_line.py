import asyncio
from collections import Counter
from collections.abc import Callable

from saccade.server.service import Service
from saccade.server.work_line import EVERY_S, WorkLine, line_of
from saccade.wire.engine_metrics import SchedulerStats, sum_of
from tests.server.fake import Caller, FakeEngine, service_for

Scripted = Callable[..., tuple[Caller, FakeEngine, Service]]


def stats(**given: float) -> SchedulerStats:
    return SchedulerStats(**{**dict.fromkeys(SchedulerStats.__dataclass_fields__, 0), **given})  # type: ignore[arg-type]


def test_a_line_shows_rates_load_and_shares() -> None:
    done = Counter(prompt_tokens=12_345, output_tokens=500, looked_up=200, found=50, real_rows=90, padded_rows=10)
    found = line_of(done, 10.0, stats(running=3, waiting=1, kv_usage=0.256, encoder_usage=0.5, encoder_queries=2), 4)
    assert found == (
        "1,234.5 prompt and 50.0 generated tokens/s, 3 running, 5 waiting, KV cache 26%, image cache 50%, "
        "prefix hits 25%, padding 10%"
    )


def test_empty_figures_are_left_out() -> None:
    found = line_of(Counter(output_tokens=10), 10.0, stats(running=1), 0)
    assert found == "0.0 prompt and 1.0 generated tokens/s, 1 running, 0 waiting, KV cache 0%"


def test_several_engines_share_a_line() -> None:
    two = sum_of([stats(running=3, waiting=1, kv_usage=0.2), stats(running=1, kv_usage=0.4)])
    assert (two.running, two.waiting, round(two.kv_usage, 6)) == (4, 1, 0.3)


def test_an_engine_that_was_restarted_counts_from_zero(engine: FakeEngine) -> None:
    service = service_for(engine)
    said: list[str] = []
    line = WorkLine(service, said.append)
    line._told = Counter(real_rows=10**6, output_tokens=3)
    service.metrics.note_tokens(output=33)
    asyncio.run(line.note(EVERY_S))
    assert said == ["0.0 prompt and 3.0 generated tokens/s, 0 running, 0 waiting, KV cache 0%"]


def test_only_busy_seconds_count(engine: FakeEngine) -> None:
    service = service_for(engine)
    said: list[str] = []
    line = WorkLine(service, said.append)

    async def run() -> None:
        for _ in range(100):
            await line.note(1.0)
        assert not said, "nothing was done"
        for second in range(int(2 * EVERY_S)):
            service.metrics.note_tokens(prompt=5, output=7)
            await line.note(1.0)
            await line.note(1.0)  # a pause
            assert len(said) == (second + 1) // int(EVERY_S)
        assert all(text.startswith("5.0 prompt and 7.0 generated tokens/s, 0 running") for text in said)

    asyncio.run(run())


def test_work_of_a_silent_engine_is_reported_later(engine: FakeEngine) -> None:
    service = service_for(engine)
    said: list[str] = []
    line = WorkLine(service, said.append)

    async def run() -> None:
        engine.is_alive = False
        service.metrics.note_tokens(output=70)
        await line.note(2 * EVERY_S)
        assert not said
        engine.is_alive = True
        await line.note(1.0)
        assert said == ["0.0 prompt and 3.5 generated tokens/s, 0 running, 0 waiting, KV cache 0%, padding 10%"]

    asyncio.run(run())

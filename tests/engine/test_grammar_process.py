"""Grammars in the engine process, where compiling does not hold up other requests."""

import asyncio
import json
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest

from saccade.client.process import AsyncEngine
from saccade.client.stream import Delta
from saccade.errors import RequestError
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings
from saccade.wire.grammar import Grammar
from saccade.wire.sampling_params import SamplingParams
from tests.engine.test_process import idle
from tests.models import tiny

BOUND_S = 300.0
SETTINGS = EngineSettings(
    device="cpu", block_size=8, kv_cache_tokens=1024, encoder_cache_tokens=256, graphs="vision=off"
)
LIMITS = SchedulerSettings(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=200, encoder_budget_tokens=64)


async def ask(engine: AsyncEngine, name: str, params: SamplingParams) -> list[Delta]:
    prompt = engine.processor.text("The man")
    return [delta async for delta in engine.generate(name, prompt, params)]


def text_of(deltas: list[Delta], index: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.index == index)


def letters(engine: AsyncEngine) -> str:
    """Letters that are tokens of the vocabulary."""
    words = [engine.processor.tokenizer.token_bytes(i) for i in range(100)]
    return "".join(sorted({w.decode() for w in words if len(w) == 1 and w.isalpha()}))


async def answers_follow_their_grammars(engine: AsyncEngine) -> None:
    known = letters(engine)
    choices = [known[:3], known[-4:], known[3] * 7]
    params = SamplingParams(grammar=Grammar("choice", json.dumps(choices)), seed=1, temperature=2, max_tokens=40, n=3)
    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    alone = text_of(await ask(engine, "alone", plain))
    both = await asyncio.gather(ask(engine, "g", params), ask(engine, "p", plain))
    assert text_of(both[1]) == alone
    for index in range(3):
        assert text_of(both[0], index) in choices
        last = [delta for delta in both[0] if delta.index == index][-1]
        assert (last.finish_reason, last.stop_reason) == ("stop", None)


async def stop_strings_stop(engine: AsyncEngine) -> None:
    letter = letters(engine)[0]
    params = SamplingParams(grammar=Grammar("regex", f"{letter}{{50}}"), stop=(letter * 5,), max_tokens=60, seed=0)
    deltas = await ask(engine, "stop", params)
    assert deltas[-1].finish_reason == "stop" and deltas[-1].stop_reason == letter * 5
    assert len(text_of(deltas)) < 5


async def broken_grammars_are_refused(engine: AsyncEngine) -> None:
    for grammar in (Grammar("regex", "("), Grammar("json_schema", "{"), Grammar("lark", "start: nothing")):
        for _ in range(2):  # also when the refusal is remembered
            with pytest.raises(RequestError, match="refused"):
                await ask(engine, "bad", SamplingParams(grammar=grammar))


async def abandoned_grammars_are_dropped(engine: AsyncEngine) -> None:
    """Slow grammars queue up. Some callers leave, others get their answers."""
    letter = letters(engine)[1]
    slow = [Grammar("regex", "|".join(f"{letter}{i}" for i in range(k, k + 2500)) + f"|{letter}+") for k in range(4)]
    params = SamplingParams(max_tokens=5, seed=0)
    tasks = [asyncio.create_task(ask(engine, f"s{i}", replace(params, grammar=g, n=2))) for i, g in enumerate(slow)]
    await asyncio.sleep(0)
    engine.abort("s3")
    tasks[1].cancel()
    results: list[Any] = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[1], asyncio.CancelledError)
    ends = [{d.finish_reason for d in deltas if d.finish_reason} for deltas in (results[0], results[2], results[3])]
    assert ends[0] <= {"stop", "length"} and ends[1] <= {"stop", "length"}
    assert "abort" in ends[2] or ends[2] <= {"stop", "length"}
    await idle(engine)


def test_a_process_follows_grammars(made: tiny.Tiny) -> None:
    async def test() -> None:
        async with await AsyncEngine.start(made.folder, SETTINGS, LIMITS) as engine:
            scenes: list[Coroutine[Any, Any, None]] = [
                answers_follow_their_grammars(engine),
                stop_strings_stop(engine),
                broken_grammars_are_refused(engine),
                abandoned_grammars_are_dropped(engine),
                answers_follow_their_grammars(engine),
            ]
            for scene in scenes:
                await scene

    asyncio.run(asyncio.wait_for(test(), BOUND_S))

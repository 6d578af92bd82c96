"""The engine in its own process: the same answers as in this one, and no request is left without an end."""

import ast
import asyncio
import io
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from saccade.client import child, process, stream
from saccade.client.output import OutputStream, place_prompt_scores
from saccade.client.process import AsyncEngine
from saccade.client.spare import Spare
from saccade.client.stream import Delta
from saccade.config import BYTECODE_FOLDER, NO_BYTECODE, worker_environment
from saccade.errors import CapacityError, ConfigError, EngineDeadError, RequestError, SaccadeError
from saccade.execution import worker
from saccade.execution.build import build_engine
from saccade.inputs.placeholders import Media, Prompt, text_prompt
from saccade.inputs.plans import MediaPlan
from saccade.inputs.positions import FeatureRows
from saccade.inputs.processor import Processor
from saccade.processes import EXIT_ORPHANED
from saccade.wire import link, messages
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings
from saccade.wire.messages import Stage
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.turn import Terms, Turn
from saccade.wire.update import FinishReason
from tests.child_processes import gone
from tests.engine.rig import Answer, oracle_tokens, random_prompt, run
from tests.models import tiny

T = TypeVar("T")
BOUND_S = 300.0  # a longer wait is a hang, even on a busy machine
SETTINGS = EngineSettings(
    device="cpu", block_size=8, kv_cache_tokens=2048, encoder_cache_tokens=512, graphs="vision=off,prefill=off"
)
LIMITS = SchedulerSettings(
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_model_len=400,
    encoder_budget_tokens=64,
    max_queued_requests=24,
    retry_after_s=7.5,
)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ENDLESS = replace(GREEDY, max_tokens=None)


@dataclass(frozen=True)
class Shared:
    """One engine and its event loop, for tests that leave it healthy."""

    engine: AsyncEngine
    loop: asyncio.Runner
    stages: list[Stage]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run(asyncio.wait_for(work, BOUND_S))


@pytest.fixture(scope="module")
def shared(made: tiny.Tiny) -> Iterator[Shared]:
    stages: list[Stage] = []
    with asyncio.Runner() as loop:
        engine = loop.run(
            asyncio.wait_for(AsyncEngine.start(made.folder, SETTINGS, LIMITS, report=stages.append), BOUND_S)
        )
        yield Shared(engine, loop, stages)
        loop.run(asyncio.wait_for(engine.aclose(), BOUND_S))
        assert not engine.is_alive and gone(engine.pid)


@pytest.fixture(autouse=True)
def _all_is_given_back(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "shared" in request.fixturenames:
        shared = request.getfixturevalue("shared")
        shared.run(idle(shared.engine))


async def idle(engine: AsyncEngine) -> None:
    """Waits until nothing runs and nothing is held."""
    while True:
        stats = (await engine.stats()).scheduler
        if not (stats.waiting or stats.running or stats.kv_usage or stats.encoder_usage):
            return
        await asyncio.sleep(0.01)


async def collect(
    engine: AsyncEngine, request_id: str, prompt: Prompt, params: SamplingParams = GREEDY, **terms: Any
) -> list[Delta]:
    return [delta async for delta in engine.generate(request_id, prompt, params, Terms(**terms))]


def token_ids(deltas: list[Delta], index: int = 0) -> list[int]:
    return [token for delta in deltas if delta.index == index for token in delta.token_ids]


def text(deltas: list[Delta], index: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.index == index)


def ends(deltas: list[Delta]) -> dict[int, str]:
    """How each output ended. Only its last delta may have a finish reason."""
    found = {}
    for delta in deltas:
        assert delta.index not in found, "a delta after the finish"
        if delta.finish_reason is not None:
            found[delta.index] = delta.finish_reason
    return found


def in_process(folder: Path, prompts: dict[str, Prompt], params: SamplingParams) -> dict[str, Answer]:
    built = build_engine(folder, SETTINGS, LIMITS, processor=Processor.from_folder(folder))
    return run(built.engine, prompts, params)


def assert_close(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """The same tokens with the same ranks. Log-probabilities may differ by rounding if passes have different shapes."""
    assert [{token: score.rank for token, score in entry.items()} for entry in found] == [
        {token: score.rank for token, score in entry.items()} for entry in expected
    ]
    for mine, other in zip(found, expected, strict=True):
        assert [s.logprob for s in mine.values()] == pytest.approx([s.logprob for s in other.values()], abs=1e-4)


def test_a_start_reports_its_stages_and_the_graphs_it_captures(shared: Shared) -> None:
    names = [stage.name for stage in shared.stages]
    assert names[0] == "loading weights" and names[-1] == "ready"
    graphs = [stage for stage in shared.stages if stage.name == "capturing graphs" and stage.total]
    assert graphs and all(0 <= stage.done < stage.total and stage.detail for stage in graphs)
    loaded = [stage.done for stage in shared.stages if stage.name == "loading weights" and stage.total]
    assert len(loaded) > 10 and loaded == sorted(loaded) and loaded[-1] > 10**4
    assert shared.engine.is_alive and shared.engine.ready.limits.max_model_len == 400
    assert shared.engine.ready.kv_cache_tokens == 2048


def test_twenty_concurrent_requests_match_transformers(made: tiny.Tiny, shared: Shared) -> None:
    rng = np.random.default_rng(1)
    prompts = {f"r{i}": random_prompt(made, rng, num_images=i % 3) for i in range(20)}
    expected = {name: oracle_tokens(made, prompt, 8) for name, prompt in prompts.items()}

    async def work() -> list[list[Delta]]:
        return await asyncio.gather(*(collect(shared.engine, name, prompt) for name, prompt in prompts.items()))

    for (name, prompt), deltas in zip(prompts.items(), shared.run(work()), strict=True):
        assert token_ids(deltas) == expected[name]
        assert text(deltas) == shared.engine.processor.tokenizer.decode(expected[name])
        assert ends(deltas) == {0: "length"} and {delta.request_id for delta in deltas} == {name}
        counts = [delta.num_output_tokens for delta in deltas]
        assert counts == sorted(set(counts)) and counts[-1] == 8
        assert {delta.num_prompt_tokens for delta in deltas} == {len(prompt)}


def test_scores_arrive_as_they_were_computed(made: tiny.Tiny, shared: Shared) -> None:
    prompt = random_prompt(made, np.random.default_rng(2), num_images=1, length=30)
    params = replace(GREEDY, logprobs=3, prompt_logprobs=2)
    answer = in_process(made.folder, {"r": prompt}, params)["r"]
    expected: list[Any] = [None] * len(prompt)
    output = OutputStream(0, shared.engine.processor.tokenizer.detokenizer(), params)
    for update in answer.updates:
        if update.prompt_scores is not None:
            place_prompt_scores(expected, prompt.token_ids, update.prompt_scores)
        output.take(update)

    deltas = shared.run(collect(shared.engine, "r", prompt, params))
    assert output.output.logprobs is not None and expected[0] is None and expected[-1] is not None
    assert_close([entry for delta in deltas for entry in delta.logprobs or ()], output.output.logprobs)
    assert_close(list(deltas[-1].prompt_logprobs or ())[1:], expected[1:])
    assert all(delta.prompt_logprobs is None for delta in deltas[:-1])


def test_each_of_several_outputs_ends_once(shared: Shared) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=6, ignore_eos=True, prompt_logprobs=0)
    deltas = shared.run(collect(shared.engine, "r", text_prompt(range(5, 25)), params))
    assert ends(deltas) == {0: "length", 1: "length", 2: "length"}
    outputs = [token_ids(deltas, index) for index in range(3)]
    assert {len(output) for output in outputs} == {6} and len({tuple(output) for output in outputs}) > 1
    assert [delta.index for delta in deltas if delta.prompt_logprobs is not None] == [0]
    again = shared.run(collect(shared.engine, "r", text_prompt(range(5, 25)), params))
    assert [token_ids(again, index) for index in range(3)] == outputs


def test_a_stop_string_ends_an_output_in_the_client_and_in_the_worker(shared: Shared) -> None:
    prompt = text_prompt(range(30, 60))
    whole = text(shared.run(collect(shared.engine, "whole", prompt, replace(ENDLESS, max_tokens=40))))
    stop = whole[len(whole) // 2 :][:3]
    deltas = shared.run(collect(shared.engine, "r", prompt, replace(ENDLESS, stop=(stop,))))
    assert shared.run(shared.engine.stats()).scheduler.running == 0
    assert text(deltas) == whole[: whole.index(stop)]
    assert ends(deltas) == {0: "stop"} and deltas[-1].stop_reason == stop


def test_cached_tokens_are_counted_apart_for_each_salt(shared: Shared) -> None:
    prompt = text_prompt(np.random.default_rng(3).integers(3, 99, 33).tolist())

    def cached(salt: str) -> int:
        return shared.run(collect(shared.engine, "r", prompt, cache_salt=salt))[-1].num_cached_tokens

    assert [cached("a"), cached("a"), cached("b")] == [0, 32, 0]


def test_bad_requests_are_refused_while_others_continue(shared: Shared) -> None:
    long, foreign, empty = text_prompt([5] * 400), text_prompt([5, 7000]), text_prompt([])

    async def work() -> list[Any]:
        good, wrong = text_prompt(range(10, 30)), [long, foreign, empty]
        jobs = [collect(shared.engine, f"g{i}", good, replace(GREEDY, max_tokens=60)) for i in range(3)]
        jobs += [collect(shared.engine, f"w{i}", prompt) for i, prompt in enumerate(wrong)]
        return await asyncio.gather(*jobs, return_exceptions=True)

    *good, too_long, out_of_range, no_tokens = shared.run(work())
    assert all(ends(deltas) == {0: "length"} for deltas in good)
    assert isinstance(too_long, RequestError)
    assert (too_long.param, too_long.code) == ("prompt", "context_length_exceeded")
    assert str(too_long).startswith("prompt has 400 tokens; this model's maximum context length is 400 tokens, ")
    assert isinstance(out_of_range, RequestError) and out_of_range.param == "prompt" and out_of_range.code is None
    assert isinstance(no_tokens, RequestError) and "the prompt is empty" in str(no_tokens)


def test_a_prompt_that_breaks_an_invariant_fails_alone(made: tiny.Tiny, shared: Shared) -> None:
    prompt = random_prompt(made, np.random.default_rng(4), num_images=1)
    broken = replace(prompt, spans=tuple(replace(span, offset=10**6) for span in prompt.spans))

    async def work() -> list[Any]:
        jobs = (collect(shared.engine, "bad", broken), collect(shared.engine, "good", prompt))
        return list(await asyncio.gather(*jobs, return_exceptions=True))

    bad, good = shared.run(work())
    assert type(bad) is SaccadeError and "AssertionError" in str(bad)
    assert ends(good) == {0: "length"} and shared.engine.is_alive


def test_an_id_can_be_used_again_only_when_its_request_is_done(shared: Shared) -> None:
    async def work() -> None:
        running = shared.engine.generate("same", text_prompt([5, 6, 7]), ENDLESS)
        await anext(running)
        with pytest.raises(RequestError, match="'same' is still running"):
            await collect(shared.engine, "same", text_prompt([5]))
        await running.aclose()
        assert ends(await collect(shared.engine, "same", text_prompt([8, 9]))) == {0: "length"}

    shared.run(work())


def test_a_full_queue_refuses_with_a_retry_time(shared: Shared) -> None:
    async def work() -> list[Any]:
        prompt = text_prompt(range(10, 20))
        jobs = (collect(shared.engine, f"r{i}", prompt, replace(GREEDY, max_tokens=12)) for i in range(60))
        return await asyncio.gather(*jobs, return_exceptions=True)

    answers = shared.run(work())
    refused = [answer for answer in answers if isinstance(answer, CapacityError)]
    assert refused and {error.retry_after_s for error in refused} == {7.5}
    assert len(refused) + sum(isinstance(answer, list) for answer in answers) == 60


def test_a_request_that_loses_its_listener_is_aborted_and_freed(made: tiny.Tiny, shared: Shared) -> None:
    rng = np.random.default_rng(6)
    prompts = [random_prompt(made, rng, num_images=i % 2) for i in range(8)]

    async def work() -> None:
        params = replace(ENDLESS, n=2)
        jobs = [asyncio.create_task(collect(shared.engine, f"r{i}", p, params)) for i, p in enumerate(prompts)]
        kept = shared.engine.generate("kept", prompts[0], ENDLESS)
        for _ in range(3):
            await anext(kept)
        assert (await shared.engine.stats()).scheduler.kv_usage > 0
        for job in jobs:
            job.cancel()
        found = await asyncio.gather(*jobs, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in found)
        await kept.aclose()
        async for _ in shared.engine.generate("left", prompts[1], ENDLESS):
            break
        while shared.engine._by_id:  # the event loop closes an abandoned generator
            await asyncio.sleep(0)
        stats = (await shared.engine.stats()).scheduler
        assert (stats.running, stats.waiting) == (0, 0)
        await idle(shared.engine)

    shared.run(work())


def test_abort_ends_every_output_for_its_listener(shared: Shared) -> None:
    async def work() -> list[Delta]:
        deltas = []
        async for delta in shared.engine.generate("r", text_prompt(range(9, 20)), replace(ENDLESS, n=2)):
            deltas.append(delta)
            if len(deltas) == 9:
                shared.engine.abort("r")
                shared.engine.abort("nobody")
        return deltas

    assert ends(shared.run(work())) == {0: "abort", 1: "abort"}


def test_a_deadline_ends_a_request(shared: Shared) -> None:
    past = time.monotonic() - 1
    deltas = shared.run(collect(shared.engine, "r", text_prompt([5, 6]), ENDLESS, deadline=past))
    assert ends(deltas) == {0: FinishReason.DEADLINE} and "the deadline passed" in str(deltas[-1].stop_reason)


def test_stats_have_every_phase(shared: Shared) -> None:
    stats = shared.run(shared.engine.stats())
    assert set(stats.phases) == {"vision", "prefill", "decode", "head", "sample"}
    assert stats.phases["decode"]["graphs"] and stats.phases["prefill"]["fallbacks"]["graphs_off"] > 0


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[child.Child]:
    """Every started worker."""
    found: list[child.Child] = []

    def watched(started: Spare | None = None) -> child.Child:
        found.append(child.Child(started))
        return found[-1]

    monkeypatch.setattr(process, "Child", watched)
    return found


def test_a_killed_worker_fails_everything_at_once(made: tiny.Tiny) -> None:
    async def work() -> None:
        engine = await AsyncEngine.start(made.folder, SETTINGS, LIMITS)
        jobs = [asyncio.create_task(collect(engine, f"r{i}", text_prompt([5, i + 3]), ENDLESS)) for i in range(8)]
        await anext(engine.generate("first", text_prompt([9]), GREEDY))
        os.kill(engine.pid, signal.SIGKILL)
        found = await asyncio.gather(*jobs, return_exceptions=True)
        assert all(isinstance(error, EngineDeadError) and "SIGKILL" in str(error) for error in found)
        assert not engine.is_alive and "SIGKILL" in await engine.wait_dead()
        for late in (engine.stats(), collect(engine, "late", text_prompt([5]))):
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await late
        await engine.aclose()
        await engine.aclose()
        assert gone(engine.pid)

    asyncio.run(asyncio.wait_for(work(), BOUND_S))


def test_an_error_refuses_a_request_even_if_nobody_reads_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Gone())
    assert worker._refusal(7, KeyError("x")).serial == 7


def test_a_worker_that_hangs_is_noticed_and_ended(made: tiny.Tiny) -> None:
    async def work() -> None:
        engine = await AsyncEngine.start(made.folder, replace(SETTINGS, watchdog_timeout_s=6.0), LIMITS)
        await anext(engine.generate("first", text_prompt([9]), GREEDY))
        os.kill(engine.pid, signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match=r"not answered for 6 seconds"):
            await collect(engine, "late", text_prompt([5]))
        assert not engine.is_alive
        await engine.aclose()
        assert gone(engine.pid)

    asyncio.run(asyncio.wait_for(work(), BOUND_S))


def test_closing_aborts_requests_then_ends_the_process(made: tiny.Tiny) -> None:
    async def work() -> None:
        async with await AsyncEngine.start(made.folder, SETTINGS, LIMITS) as engine:
            await anext(endless := engine.generate("endless", text_prompt([7, 8]), replace(ENDLESS, n=100)))
            closing = asyncio.create_task(engine.aclose())
            await asyncio.sleep(0)
            with pytest.raises(EngineDeadError, match="is closing"):
                await collect(engine, "late", text_prompt([5]))
            rest = ends([delta async for delta in endless])
            assert set(rest) == set(range(100)) and "abort" in rest.values()
            await closing
        assert gone(engine.pid) and await engine.wait_dead() == "the engine was closed"
        with pytest.raises(EngineDeadError, match="was closed"):
            await engine.stats()

    asyncio.run(asyncio.wait_for(work(), BOUND_S))


def test_a_cancelled_start_leaves_no_process(made: tiny.Tiny, children: list[child.Child]) -> None:
    async def work() -> None:
        start = asyncio.create_task(AsyncEngine.start(made.folder, SETTINGS, LIMITS))
        while not children:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start

    asyncio.run(asyncio.wait_for(work(), BOUND_S))
    [worker_child] = children
    assert gone(worker_child.process.pid)


def test_a_worker_that_cannot_continue_says_why(made: tiny.Tiny, capfd: Any) -> None:
    async def work() -> None:
        engine = await AsyncEngine.start(made.folder, SETTINGS, LIMITS)
        pending = asyncio.create_task(collect(engine, "r", text_prompt([5, 6]), ENDLESS))
        await asyncio.sleep(0)
        engine._child._link.send([b"\xc1 is no message"])
        with pytest.raises(EngineDeadError, match="the engine died: DecodeError"):
            await pending
        assert not engine.is_alive
        await engine.aclose()
        assert gone(engine.pid)

    asyncio.run(asyncio.wait_for(work(), BOUND_S))
    assert "Traceback" in capfd.readouterr().err


def test_errors_found_by_the_worker_are_raised_by_start(made: tiny.Tiny) -> None:
    async def work() -> None:
        small = replace(SETTINGS, kv_cache_tokens=64)
        with pytest.raises(ConfigError, match=r"^the KV cache holds 64 tokens; a request may have 512 \(lower"):
            await AsyncEngine.start(made.folder, small, replace(LIMITS, max_model_len=0))
        with pytest.raises(ConfigError, match=r"^max_model_len is 4000; this model's positions end at 512 \(--max"):
            await AsyncEngine.start(made.folder, small, replace(LIMITS, max_model_len=4000))
        with pytest.raises(ConfigError, match="is not a folder"):
            await AsyncEngine.start(made.folder / "nothing")

    asyncio.run(asyncio.wait_for(work(), BOUND_S))


PARENT = """
    import asyncio, sys
    from saccade.client.process import AsyncEngine
    from saccade.wire.engine_settings import EngineSettings, SchedulerSettings

    async def main():
        engine = await AsyncEngine.start(
            sys.argv[1],
            EngineSettings(device="cpu", enforce_eager=True, kv_cache_tokens=512, encoder_cache_tokens=64),
            SchedulerSettings(max_model_len=256, max_num_seqs=2, max_num_batched_tokens=64, encoder_budget_tokens=64),
        )
        print(engine.pid, flush=True)
        await asyncio.sleep(300)

    asyncio.run(asyncio.wait_for(main(), 300))
"""


def test_a_worker_ends_with_its_parent(made: tiny.Tiny) -> None:
    command = [sys.executable, "-c", textwrap.dedent(PARENT), str(made.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        try:
            pid = int(parent.stdout.readline())
            assert not gone(pid)
        finally:
            parent.kill()
    end = time.monotonic() + BOUND_S
    while not gone(pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert gone(pid)


@pytest.mark.parametrize("is_input", [True, False], ids=["standard input", "the socket"])
def test_a_worker_ends_when_its_input_does(is_input: bool, capfd: Any) -> None:
    """If the kernel does not report its parent's death, a worker learns of it from its files."""
    with Spare() as started:
        assert started.process.stdin is not None
        started.process.stdin.close() if is_input else started.socket.close()
        assert started.process.wait(BOUND_S) == EXIT_ORPHANED
    assert "Traceback" not in capfd.readouterr().err


def test_a_prompt_of_images_videos_and_limits_survives_the_wire() -> None:
    rng = np.random.default_rng(8)
    plan = MediaPlan((8, 8), (1, 2, 2), 4, 1, (0, 2), (0.25,), 0.5)
    video = Media("video", rng.integers(0, 256, (2, 9, 7, 3)).astype(np.uint8), plan, rng.bytes(32))
    wide = rng.integers(0, 256, (6, 10, 3)).astype(np.uint8)
    image = Media("image", wide[:, ::2], MediaPlan((8, 8), (1, 2, 2), 4, 1), rng.bytes(32))
    spans = FeatureRows(1, (1, 1, 1), 0.5), FeatureRows(3, (1, 1, 1), media_idx=1)
    ints = [rng.integers(0, 2**31 - 1, shape).astype(np.int32) for shape in ((5,), (3, 5), (5,))]
    sent = Prompt(ints[0], ints[1], -3, ints[2], (video, image), spans)
    head, arrays = messages.pack_prompt(sent)
    assert arrays[0] is video.pixels
    add = messages.Add(7, head, SamplingParams(logit_bias={3: -1.5}, stop="x"), Turn(1, "t", 0.5), 2.5, "salt")
    # Frames at odd addresses, as sockets deliver them.
    frames = [memoryview(b"." + array.tobytes())[1:] for array in arrays]
    received = messages.decode_command(messages.encode(add))
    found = messages.unpack_prompt(received.prompt, frames)
    assert received == add and (found.rope_delta, found.spans) == (-3, spans)
    for mine, other in zip(ints, (found.token_ids, found.positions_3T, found.limits_T), strict=True):
        np.testing.assert_array_equal(mine, other)
    for media, other_media in zip(sent.media, found.media, strict=True):
        np.testing.assert_array_equal(media.pixels, other_media.pixels)
        assert (media.kind, media.plan, media.digest) == (other_media.kind, other_media.plan, other_media.digest)


async def until_idle(engine: AsyncEngine) -> None:
    async with asyncio.timeout(BOUND_S):
        while (await engine.stats()).scheduler.running:
            await asyncio.sleep(0.02)


def test_tokens_queued_for_a_slow_listener_arrive_together(shared: Shared) -> None:
    prompt, params = text_prompt(range(30, 60)), SamplingParams(seed=3, max_tokens=40, ignore_eos=True)
    whole = token_ids(shared.run(collect(shared.engine, "whole", prompt, params)))
    last = list(dict.fromkeys(whole))[-1]
    assert whole.index(last) >= 10
    params = replace(params, stop_token_ids=(last,))

    async def work() -> list[Delta]:
        deltas = []
        async for delta in shared.engine.generate("slow", prompt, params):
            deltas.append(delta)
            if len(deltas) == 1:
                await until_idle(shared.engine)
        return deltas

    fast, slow = shared.run(collect(shared.engine, "fast", prompt, params)), shared.run(work())
    assert token_ids(slow) == token_ids(fast) == whole[: whole.index(last) + 1]
    assert text(slow) == text(fast) and ends(slow) == {0: "stop"} and slow[-1].stop_reason == last
    assert len(slow) < 8


@pytest.mark.parametrize("module", [child, link, messages, process, stream, worker], ids=lambda module: module.__name__)
def test_nothing_is_pickled(module: Any) -> None:
    nodes = list(ast.walk(ast.parse(Path(module.__file__).read_text())))
    named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    named |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    assert not named & {"pickle", "multiprocessing", "marshal", "shelve"}


def test_an_unused_spare_worker_ends() -> None:
    with Spare() as unused:
        assert unused.process.poll() is None
    assert gone(unused.process.pid)


def test_a_worker_has_its_own_bytecode_cache_if_none_may_be_written_next_to_sources(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(NO_BYTECODE, raising=False)
    monkeypatch.delenv(BYTECODE_FOLDER, raising=False)
    assert worker_environment() == dict(os.environ)
    monkeypatch.setenv(NO_BYTECODE, "1")
    kept = tmp_path / "saccade" / "bytecode"
    asked = worker_environment()
    assert NO_BYTECODE not in asked and asked[BYTECODE_FOLDER] == str(kept)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    code = "import saccade.errors"
    subprocess.run([sys.executable, "-P", "-c", code], env=asked, check=True, timeout=BOUND_S)
    assert [found.name.split(".")[0] for found in kept.rglob("errors.*.pyc") if "saccade" in found.parts] == ["errors"]
    monkeypatch.setenv(BYTECODE_FOLDER, "/chosen/by/the/user")
    assert worker_environment()[BYTECODE_FOLDER] == "/chosen/by/the/user"
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert worker_environment() == dict(os.environ)


def test_a_spare_worker_is_taken_over(made: tiny.Tiny) -> None:
    async def work(waiting: Spare) -> int:
        async with await AsyncEngine.start(made.folder, SETTINGS, LIMITS, spare=waiting) as engine:
            return engine.pid

    with Spare() as waiting:
        assert asyncio.run(work(waiting)) == waiting.process.pid
    assert waiting.is_taken and gone(waiting.process.pid)


def test_caches_are_emptied_when_nothing_runs(made: tiny.Tiny, shared: Shared) -> None:
    prompt = random_prompt(made, np.random.default_rng(77), num_images=1, length=40)

    async def cached(name: str) -> int:
        return (await collect(shared.engine, name, prompt))[-1].num_cached_tokens

    async def work() -> None:
        assert [await cached("a"), await cached("b") > 0] == [0, True]
        source = shared.engine.generate("long", prompt, ENDLESS)
        await anext(source)
        assert not await shared.engine.flush_cache()
        await source.aclose()
        await idle(shared.engine)
        assert await shared.engine.flush_cache()
        assert await cached("c") == 0

    shared.run(work())


def test_a_prompt_is_scored_without_an_answer(made: tiny.Tiny, shared: Shared) -> None:
    prompt = random_prompt(made, np.random.default_rng(78), num_images=1, length=40)
    params = replace(GREEDY, max_tokens=0, prompt_logprobs=1)
    [delta] = shared.run(collect(shared.engine, "scored", prompt, params))
    assert (delta.token_ids, delta.text, delta.finish_reason, delta.num_output_tokens) == ((), "", "length", 0)
    assert delta.prompt_logprobs is not None and len(delta.prompt_logprobs) == len(prompt)
    assert delta.prompt_logprobs[0] is None and None not in delta.prompt_logprobs[1:]

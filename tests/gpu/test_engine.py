"""The whole engine on the GPU at the dimensions of Qwen3-VL-8B, in bfloat16 with random weights.

A replay and an eager run of the same padded bucket launch the same kernels on the same shapes, so tokens and
log-probabilities agree to the last bit between full graphs, piecewise graphs and no graphs at all. A run without
padding multiplies matrices of other shapes, which add up in another order: there only rounding may differ.

`SACCADE_TEST_LAYERS=n` keeps n decoder layers, `SACCADE_TEST_REQUESTS=n` sends n requests instead of 200, and
`SACCADE_TEST_SECONDS=n` watches memory for n seconds.
"""

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from saccade.execution.executor import DeviceExecutor
from saccade.graphs import VerifyReport, verify
from saccade.models.vlm import Model
from saccade.scheduling.engine import Engine
from saccade.scheduling.orders import Run
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.update import FinishReason
from tests.engine.rig import executor_of
from tests.gpu.engine_rig import (
    SERVING,
    WAYS,
    Answer,
    Job,
    PaddedEager,
    Sizes,
    drive,
    dummy_model,
    few_buckets,
    free,
    greedy,
    new_engine,
    new_runner,
    random_prompt,
    used_bytes,
    with_buckets,
)

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("clean")]

DEVICE, DTYPE = "cuda", torch.bfloat16
SIZES = Sizes()
NUM_REQUESTS = int(os.environ.get("SACCADE_TEST_REQUESTS", "200"))
WATCHED_S = float(os.environ.get("SACCADE_TEST_SECONDS", "20"))
MAX_PROMPT, MAX_OUTPUT, MAX_SIDE = 1500, 24, 700
MIB = 2**20


def mixed_jobs(runner: DeviceExecutor, count: int, *, seed: int) -> list[Job]:
    """Short and long prompts, a third with one or two images, that arrive while others are being answered."""
    rng = np.random.default_rng(seed)
    jobs = []
    for i in range(count):
        num_images = int(rng.choice([0, 0, 0, 0, 1, 2]))
        longest = MAX_PROMPT // 3 if num_images else MAX_PROMPT
        num_tokens = 1 if i % 17 == 0 else int(rng.integers(1, longest + 1))
        prompt = random_prompt(runner, rng, num_tokens, num_images, MAX_SIDE)
        params = greedy(int(rng.integers(1, MAX_OUTPUT + 1)), logprobs=20)
        jobs.append(Job(int(rng.integers(0, max(count // 2, 1))), f"r{i}", prompt, params))
    return jobs


def answer(model: Model, way: str) -> tuple[dict[str, Answer], str]:
    """The answers of one mode, and a line of figures."""
    runner = new_runner(model, SIZES, way)
    started = time.perf_counter()
    if WAYS[way] is not None:
        runner.capture()
    captured = time.perf_counter()
    answers = drive(new_engine(runner, SIZES), mixed_jobs(runner, NUM_REQUESTS, seed=7))
    wall_s = time.perf_counter() - captured
    bad = {name: found.finish for name, found in answers.items() if _ended(found) is not FinishReason.LENGTH}
    assert not bad, f"{way}: {bad}"
    for phase in runner.phases:
        if WAYS[way] is not None and phase.phase.name != "sample":  # greedy requests need no sampler
            assert phase.stats.replays and not phase.stats.fallbacks, f"{way}: {phase.phase.name} {phase.stats}"
    stats = {p.phase.name: p.stats for p in runner.phases if p.stats.real_rows}
    padding = " ".join(f"{name} {one.padded_rows / one.real_rows:.1%}" for name, one in stats.items())
    num_tokens = sum(len(found.tokens) for found in answers.values())
    line = f"{way:14} {captured - started:6.1f} s capture {wall_s:6.1f} s traffic {num_tokens:6} tokens  {padding}"
    return answers, line


def _ended(found: Answer) -> FinishReason | None:
    return None if found.finish is None else found.finish.reason


@pytest.fixture(scope="module")
def expected(model: Model) -> tuple[dict[str, Answer], str]:
    free()
    return answer(model, "full")


@pytest.mark.parametrize("way", ["piecewise", "eager"])
def test_the_same_padding_gives_the_same_bits(
    way: str, model: Model, expected: tuple[dict[str, Answer], str], show: Any
) -> None:
    full, full_line = expected
    other, line = answer(model, way)
    show(f"{len(full)} mixed requests", full_line, line)
    differing = [name for name in full if full[name].tokens != other[name].tokens]
    assert not differing, f"{len(differing)} of {len(full)} requests differ, such as {differing[:5]}"
    for name, found in full.items():
        assert found.likeliest == other[name].likeliest, f"{name}: equal tokens, different log-probabilities"


class Traffic:
    """Endless mixed requests with all kinds of parameters, some of them aborted."""

    def __init__(self, engine: Engine, seed: int, num_prompts: int = 48) -> None:
        self.engine = engine
        self.rng = np.random.default_rng(seed)
        self.prompts = [job.prompt for job in mixed_jobs(executor_of(engine), num_prompts, seed=seed)]
        self.live: set[str] = set()
        self.ends: dict[FinishReason, int] = {}
        self.num_sent = 0

    def step(self, wanted: int) -> None:
        while len(self.live) < wanted:
            name = f"t{self.num_sent}"
            self.engine.add(name, self.prompts[int(self.rng.integers(len(self.prompts)))], self._params())
            self.live.add(name)
            self.num_sent += 1
        updates = self.engine.step()
        if self.live and self.rng.random() < 0.1:
            updates += self.engine.abort(str(self.rng.choice(sorted(self.live))))
        for update in updates:
            if update.finish is not None:
                self.live.discard(update.request_id)
                self.ends[update.finish.reason] = self.ends.get(update.finish.reason, 0) + 1

    def run(self, seconds: float, wanted: int) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.step(wanted)
        while self.engine.has_work:
            self.step(0)

    def _params(self) -> SamplingParams:
        max_tokens = int(self.rng.integers(1, MAX_OUTPUT + 1))
        kinds: list[Mapping[str, Any]] = [
            {"temperature": 0.0},
            {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
            {"temperature": 0.0, "logprobs": 5},
            {"temperature": 1.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
            {"temperature": 0.0, "prompt_logprobs": 1},
            {"temperature": 1.0, "min_p": 0.05, "logit_bias": {17: 2.0}, "min_tokens": 1, "stop_token_ids": (5,)},
            *({"max_tokens": 0, "pooling": pooling} for pooling in ("last", "mean")),
            {"max_tokens": 0, "pooling": "logits", "pooled_token_ids": (5, 9)},
        ]
        return SamplingParams(**{"max_tokens": max_tokens, **kinds[int(self.rng.integers(len(kinds)))]})


@pytest.mark.alone
def test_memory_is_flat(model: Model, show: Any) -> None:
    """Without `empty_cache`, so that this is the memory that other processes cannot have."""
    runner = new_runner(model, SIZES, "full")
    runner.capture()
    engine = new_engine(runner, SIZES, has_prefix_cache=True)
    ready = used_bytes()
    traffic = Traffic(engine, seed=11)
    traffic.run(min(WATCHED_S, 15.0), wanted=SIZES.max_num_seqs + 16)
    warm = used_bytes()
    warm_sent = traffic.num_sent
    traffic.run(WATCHED_S, wanted=SIZES.max_num_seqs + 16)
    after = used_bytes()
    show(
        f"memory in use, MiB: ready {ready / MIB:.0f}, warm {warm / MIB:.0f} (+{(warm - ready) / MIB:.0f}), "
        f"after {WATCHED_S:.0f} s more {after / MIB:.0f} (+{(after - warm) / MIB:.0f})",
        f"{warm_sent} + {traffic.num_sent - warm_sent} requests: { ({k.value: v for k, v in traffic.ends.items()}) }",
        f"preemptions {engine.scheduler.num_preemptions}; {torch.cuda.memory_allocated() / MIB:.0f} MiB allocated, "
        f"{torch.cuda.memory_reserved() / MIB:.0f} MiB reserved by torch",
    )
    assert FinishReason.ERROR not in traffic.ends
    assert traffic.ends[FinishReason.ABORT] > 0
    engine.scheduler.check()
    assert after <= warm, f"memory grew by {(after - warm) / MIB:.1f} MiB"


@pytest.mark.alone
def test_every_bucket_of_every_phase_is_captured(model: Model, show: Any) -> None:
    """At the server's default sizes. As at start-up, measuring memory compiles the kernels first."""
    runner = new_runner(model, SERVING, "full", num_blocks=SERVING.max_model_len // SERVING.block_size + 1)
    started = time.perf_counter()
    runner.capture(largest_only=True)
    first_s = time.perf_counter() - started
    before = used_bytes()
    started = time.perf_counter()
    runner.capture()
    torch.cuda.synchronize()
    wall_s = time.perf_counter() - started
    lines = [f"{'phase':10} {'graphs':>6} {'seconds':>8} {'graphs MiB':>11} {'buffers MiB':>12}"]
    for phase in runner.phases:
        seconds, nbytes = (sum(getattr(g, name) for g in phase.graphs) for name in ("capture_s", "nbytes"))
        buffers = phase.phase.arena.nbytes / MIB
        lines.append(f"{phase.phase.name:10} {len(phase.graphs):6} {seconds:8.2f} {nbytes / MIB:11.0f} {buffers:12.0f}")
        assert len(phase.graphs) == len(phase.phase.buckets)
    count = sum(len(phase.graphs) for phase in runner.phases)
    held = (used_bytes() - before) / MIB
    show(*lines, f"all {count} graphs in {wall_s:.2f} s (largest of each before: {first_s:.2f} s), {held:.0f} MiB more")


FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
PARTLY_FP8: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**FP8, "strategy": "channel", "dynamic": False},
            "input_activations": {**FP8, "strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["lm_head", "re:.*layers.5.self_attn", "re:.*layers.4.mlp", "re:.*blocks.20.mlp", "re:.*merger.*"],
}


@pytest.mark.parametrize(
    ("name", "more"),
    [("Gemma-3-4B", {}), ("Qwen2.5-VL-7B", {}), ("Qwen3-VL-8B", {"quantization_config": PARTLY_FP8})],
    ids=["Gemma-3-4B", "Qwen2.5-VL-7B", "Qwen3-VL-8B partly in FP8"],
)
def test_other_models_capture_all_graphs_of_a_server(
    name: str, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, show: Any
) -> None:
    """Attention is split by rows and by requests, so buckets with equally many rows may launch different kernels; all
    must be compiled and loaded when a capture begins. A few layers show that. Two of three requests have images."""
    from tests.gpu.test_families import FAMILIES  # imports transformers

    monkeypatch.setenv("SACCADE_TEST_LAYERS", "7")  # Gemma: six with a window, one without
    made = dummy_model(FAMILIES[name][0] | more, tmp_path, device=DEVICE, dtype=DTYPE)
    sizes = Sizes(max_num_seqs=256, max_tokens=2048, max_model_len=2048, bucket_stride=1)
    runner = new_runner(made, sizes, "full")
    runner.capture()
    for phase in runner.phases:
        assert len(phase.graphs) == len(phase.phase.buckets)
    jobs = [
        Job(i // 4, f"r{i}", random_prompt(runner, np.random.default_rng(i), 35 * i + 1, i % 3, 300), greedy(6))
        for i in range(40)
    ]
    answers = drive(new_engine(runner, sizes), jobs)
    show(f"{name}: {sum(len(phase.graphs) for phase in runner.phases)} graphs, {len(answers)} answers")
    assert all(_ended(found) is FinishReason.LENGTH for found in answers.values())
    assert all(not phase.stats.fallbacks for phase in runner.phases)
    assert runner.vision is not None and runner.vision.stats.replays.total() > 0


@pytest.mark.parametrize("phase_name", ["vision", "prefill", "decode", "head", "sampler"])
@pytest.mark.parametrize("way", ["full", "piecewise"])
def test_verify_finds_no_difference_to_eager_runs_of_the_same_shapes(
    phase_name: str, way: str, model: Model, show: Any
) -> None:
    """All adversarial sequences, bucket by bucket and across buckets; every bit counts."""
    if way == "piecewise" and phase_name not in ("prefill", "decode"):
        pytest.skip("this phase has no outside calls")
    runner = new_runner(model, SIZES, way)
    _fill_with_noise(runner)
    phase = getattr(runner, phase_name)
    buckets = few_buckets(phase, 3)
    reports = []
    for bucket in buckets:
        alone = with_buckets(phase, bucket, kind=PaddedEager)
        alone.capture_buckets()
        reports.append(verify(alone))
    show(*map(summary, reports))
    for report in reports:
        assert report.is_right and all(row.difference == 0.0 for row in report.rows), f"\n{report}"


@pytest.mark.parametrize("phase_name", ["vision", "prefill"])
def test_padding_changes_hidden_states_by_rounding_alone(phase_name: str, model: Model, show: Any) -> None:
    """`verify` without `same_shape` compares with eager runs without padding. There a single row runs in kernels of its
    own, whose rounding the estimate does not cover, so a few values may exceed it. Harmful padding would change most
    values of a row."""
    runner = new_runner(model, SIZES, "full")
    _fill_with_noise(runner)
    phase = getattr(runner, phase_name)
    few = with_buckets(phase, *few_buckets(phase, 3))
    few.capture_buckets()
    report = verify(few)
    show(summary(report), f"right within the default tolerance: {report.is_right}")
    for row in report.rows:
        assert not row.problem or is_a_stray(row.problem), row


def is_a_stray(problem: str) -> bool:
    """Whether padding matters to at most one value in a thousand."""
    found = re.fullmatch(r"padding matters: (\d+) of (\d+) values of .*", problem)
    return found is not None and int(found[1]) * 1000 <= int(found[2])


def summary(report: VerifyReport) -> str:
    worst = max(report.rows, key=lambda row: row.difference)
    count = sum(row.num_batches for row in report.rows)
    return (
        f"{report.rows[0].key:44} {count:4} batches in {len(report.rows):2} sequences; largest difference "
        f"{worst.difference:.1e} ({worst.key}, {worst.sequence})"
    )


def _fill_with_noise(runner: DeviceExecutor) -> None:
    """So that no result is right just because its inputs are zero."""
    state = runner.state
    for cache in state.caches:
        for part in cache:
            part.normal_()
    state.edited.normal_()
    state.logits.normal_()
    assert state.vision_rows is not None
    state.vision_rows.normal_()
    arena = runner.prefill.phase.arena
    arena.views(arena.limits)["trunk"].normal_()


def test_a_launch_never_waits_for_the_device(model: Model, show: Any) -> None:
    """Prompts with images, mixed steps and decode steps, sampling and scores: only `Ticket.wait` waits."""
    runner = new_runner(model, SIZES, "full")
    runner.capture()
    engine = new_engine(runner, SIZES)
    Traffic(engine, seed=3).run(3.0, wanted=24)  # compiles kernels that are in no graph
    steps: dict[str, list[float]] = {}
    errors: list[Exception] = []

    execute = runner.execute

    def watched(orders: Any) -> Any:
        started = time.perf_counter()
        try:
            with no_sync():
                return execute(orders)
        except Exception as error:
            errors.append(error)
            raise
        finally:
            kind = f"Run {orders.passes[0].phase}" if isinstance(orders, Run) else type(orders).__name__
            steps.setdefault(kind, []).append((time.perf_counter() - started) * 1e3)

    runner.execute = watched  # type: ignore[method-assign]
    traffic = Traffic(engine, seed=5)
    traffic.run(3.0, wanted=24)
    show(
        "host time of an order, ms",
        *(
            f"{kind:22} {len(ms):5} orders, median {np.median(ms):7.2f}, most {max(ms):7.2f}"
            for kind, ms in steps.items()
        ),
    )
    assert not errors, errors[0]
    assert FinishReason.ERROR not in traffic.ends, "a vision pass that waits fails only its request"
    assert {"Begin", "Encode", "Run prefill", "Run decode", "SampleTokens"} <= steps.keys()


@contextmanager
def no_sync() -> Iterator[None]:
    """Operations that make the host wait raise."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_sync_guard_sees_a_wait() -> None:
    x = torch.ones(3, device=DEVICE)
    with pytest.raises(RuntimeError), no_sync():
        x.sum().item()

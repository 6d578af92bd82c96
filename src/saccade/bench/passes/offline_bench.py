"""Times the engine's passes without requests: prefill and decode, eager and as graphs, against their hardware limits.

All ways run in one process on the same weights, caches and inputs, through the engine's own runners, so times include
filling buffers, choosing the bucket, and padding. Prefill is one prompt on an idle device up to the last attention. The
last MLP and the LM head, needed only for a prompt's last row, are timed as the head. Decode steps run back to back.
Every replay is compared with an eager run on the same padded buffers.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.bench.passes.limits import Limit, Rates, decode_limit, head_limit, prefill_limit
from saccade.bench.passes.pass_settings import OfflineBenchSettings, suited_to
from saccade.bench.passes.timing import (
    A_PRODUCT,
    describe_model,
    free,
    item_sizes,
    latency_ms,
    load_measured,
    rates_of,
    step_ms,
    wait,
)
from saccade.config import Mode
from saccade.execution.executor import DeviceExecutor, ExecutorSettings
from saccade.execution.state import DeviceState, StateSizes, new_state
from saccade.graphs import Batch, GraphKey, GraphRunner, copy_out
from saccade.kernels.dispatch import device_named, sampling_for
from saccade.models.vlm import Model

Values = Mapping[str, Any]

PAGE_ROWS = 16
NO_GRAPHS: dict[str, Mode | None] = {"vision": None, "prefill": None, "decode": None}
WAYS: dict[str, dict[str, Mode | None]] = {
    "eager": NO_GRAPHS,
    "piecewise": NO_GRAPHS | {"prefill": Mode.PIECEWISE},
    "full": dict.fromkeys(NO_GRAPHS, Mode.FULL),
}


@dataclass(frozen=True, slots=True)
class PassTimes:
    """One way to run one pass. `rows` is `size` after padding; the limit is for `size` rows."""

    phase: str
    size: int
    rows: int
    way: str
    ms: float
    host_ms: float
    tokens_per_s: float
    products_ms: float
    limit_ms: float
    bound_by: str
    of_limit: float


@dataclass(frozen=True, slots=True)
class Check:
    """A replay compared with an eager run on the same padded buffers. `difference` is the largest one of outputs
    (prefill) or logits (decode), relative to the largest value."""

    phase: str
    size: int
    way: str
    has_equal_tokens: bool
    difference: float


@dataclass(frozen=True, slots=True)
class Captured:
    """The graphs of one phase. `graph_bytes` excludes the phase's buffers."""

    way: str
    phase: str
    num_graphs: int
    seconds: float
    graph_bytes: int
    buffer_bytes: int


@dataclass(frozen=True, slots=True)
class TimedStage:
    name: str
    seconds: float


@dataclass(slots=True)
class OfflineBench:
    lines: list[PassTimes] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    captures: list[Captured] = field(default_factory=list)
    stages: list[TimedStage] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)

    def of_phase(self, phase: str) -> list[PassTimes]:
        """Sorted by size, then by way."""
        ways = list(WAYS)
        found = (line for line in self.lines if line.phase == phase)
        return sorted(found, key=lambda line: (line.size, ways.index(line.way)))


def run_offline_bench(model_name: str, settings: OfflineBenchSettings, progress: Callable[[str], None]) -> OfflineBench:
    bench = OfflineBench()
    device = device_named(settings.device)
    settings = suited_to(device.type, settings)

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        progress(name)
        started = perf_counter()
        yield
        wait(device)
        bench.stages.append(TimedStage(name, perf_counter() - started))

    with stage("weights"):
        model = load_measured(model_name, settings, device)
    with stage("kernels"):
        model.place.kernels.compile(device, model.place.dtype)
    with stage("caches"):
        state = bench_state(model, settings)
    rates = rates_of(device, model.place.dtype, settings.flop_per_s, settings.bytes_per_s)
    for way, modes in WAYS.items():
        with stage(f"{way}: buffers"):
            executor = bench_executor(state, settings, modes)
        with stage(f"{way}: first passes"):
            _run_once(executor, settings)
        if any(modes.values()):
            with stage(f"{way}: capture"):
                executor.capture(lambda done, total, key: progress(f"capture {key} ({done + 1} of {total})"))
            bench.captures += _captured(executor, way)
        with stage(f"{way}: measure"):
            for work in _works(executor, settings, rates):
                progress(f"{way}: {work.phase} of {work.size}")
                _measure(bench, work, way, settings.rounds)
        del executor, work
        free(device)
    bench.environment = _environment(model, state, rates, settings)
    return bench


def bench_state(model: Model, settings: OfflineBenchSettings) -> DeviceState:
    """Caches for the longest prompt and the largest batch, full of noise, because zeros would save a GPU power."""
    block_size = settings.block_size or (128 if model.place.device.type == "cuda" else 16)
    longest = max(*settings.tokens, settings.context, settings.max_model_len)
    needed = max(-(-longest // block_size), max(settings.batches) * -(-settings.context // block_size))
    sizes = StateSizes(
        num_blocks=needed + 1,
        block_size=block_size,
        max_blocks=-(-longest // block_size),
        max_sequences=max(settings.batches),
        num_vision_rows=settings.encoder_budget_tokens + PAGE_ROWS,
    )
    state = new_state(model, sampling_for(model.place.device), sizes)
    for cache in state.caches:
        for part in cache:
            part.normal_()
    return state


def bench_executor(
    state: DeviceState, settings: OfflineBenchSettings, modes: Mapping[str, Mode | None]
) -> DeviceExecutor:
    max_tokens = max(*settings.tokens, state.max_sequences)
    return DeviceExecutor(
        state,
        ExecutorSettings(
            max_tokens=max_tokens,
            max_units=settings.encoder_budget_tokens,
            page_rows=PAGE_ROWS,
            images=None,
            videos=None,
            modes=modes,
            strict=True,
            has_few_buckets=state.model.place.device.type != "cuda",
        ),
    )


def prefill_values(executor: DeviceExecutor, tokens: int) -> Values:
    return executor.prefill.phase.example((tokens,), torch.Generator().manual_seed(tokens))


def decode_values(state: DeviceState, batch: int, context: int) -> Values:
    """One row per request; each reads `context` keys from its own blocks, which are scattered over the cache."""
    rng = np.random.default_rng(batch)
    count = -(-context // state.block_size)
    tables = np.zeros((batch, state.max_blocks), dtype=np.int32)
    tables[:, :count] = rng.permutation(np.arange(1, state.num_blocks))[: batch * count].reshape(batch, count)
    last = context - 1
    return {
        "ids": rng.integers(0, state.logits.shape[1], batch),
        "pending": np.full(batch, -1),
        "positions": np.full((3, batch), last),
        "slots": tables[:, last // state.block_size].astype(np.int64) * state.block_size + last % state.block_size,
        "query_start": np.arange(batch + 1),
        "key_lengths": np.full(batch, context, dtype=np.int32),
        "block_tables": tables,
        "sequences": np.arange(1, batch + 1, dtype=np.int32),
    }


@dataclass(frozen=True, slots=True)
class _Work:
    """One pass to measure. `to_scores` turns its outputs into (scores, tokens), which are compared."""

    phase: str
    size: int
    runner: GraphRunner
    values: Values
    limit: Limit
    to_scores: Callable[[Mapping[str, Tensor]], tuple[Tensor, Tensor]]

    def run(self) -> None:
        self.runner.run(self.values, lambda outputs: None)


def _works(executor: DeviceExecutor, settings: OfflineBenchSettings, rates: Rates) -> Iterator[_Work]:
    """Yields prefill for every way; decode and head not for piecewise graphs, which only prefill has."""
    model, state = executor.state.model, executor.state
    spec, sizes = model.spec.decoder, item_sizes(model, A_PRODUCT)

    def last_token(outputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return outputs["trunk"], model.decoder.logits(model.decoder.finish(outputs["trunk"][-1:])).argmax(dim=-1)

    def next_tokens(outputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return state.logits[: outputs["next_ids"].shape[0]].clone(), outputs["next_ids"]

    for tokens in settings.tokens:
        limit = prefill_limit(spec, tokens, sizes, rates)
        yield _Work("prefill", tokens, executor.prefill, prefill_values(executor, tokens), limit, last_token)
    if executor.settings.modes["prefill"] is Mode.PIECEWISE:
        return
    one_row = {"rows": np.zeros(1, dtype=np.int32), "sequences": np.ones(1, dtype=np.int32)}
    yield _Work("head", 1, executor.head, one_row, head_limit(spec, 1, sizes, rates), next_tokens)
    for batch in settings.batches:
        limit = decode_limit(spec, batch, settings.context, sizes, rates)
        values = decode_values(state, batch, settings.context)
        yield _Work("decode", batch, executor.decode, values, limit, next_tokens)


def _measure(bench: OfflineBench, work: _Work, way: str, rounds: int) -> None:
    batch = work.runner.phase.arena.admit(work.values)
    key = work.runner.decide(batch).key
    if key is not None:
        bench.checks.append(_check(work, batch, key, way))
    measure = latency_ms if work.phase == "prefill" else step_ms
    ms, host_ms = measure(work.run, work.runner.phase.arena.device, rounds)
    times = PassTimes(
        phase=work.phase,
        size=work.size,
        rows=key.capacity["tokens"] if key is not None else work.size,
        way=way,
        ms=ms,
        host_ms=host_ms,
        tokens_per_s=work.size / ms * 1e3,
        products_ms=work.limit.products_ms,
        limit_ms=work.limit.ms,
        bound_by=work.limit.bound_by,
        of_limit=work.limit.ms / ms,
    )
    bench.lines.append(times)


@torch.no_grad()
def _check(work: _Work, batch: Batch, key: GraphKey, way: str) -> Check:
    scores, tokens = work.to_scores(work.runner.eager(work.values, copy_out, at=key.capacity))
    replayed_scores, replayed_tokens = work.to_scores(work.runner.replay(key, batch, copy_out))
    difference = (replayed_scores.double() - scores.double()).abs().max() / scores.double().abs().max()
    return Check(work.phase, work.size, way, torch.equal(replayed_tokens, tokens), float(difference))


def _run_once(executor: DeviceExecutor, settings: OfflineBenchSettings) -> None:
    """Compiles and loads kernels, so that capture times do not include that."""
    for phase in executor.phases:
        if phase.settings.tiers:
            example = phase.example_for(phase.phase.buckets[-1])
            phase.eager({**example.tensors, **example.arrays}, lambda outputs: None)
    for tokens in (min(settings.tokens), max(settings.tokens)):
        executor.prefill.eager(prefill_values(executor, tokens), lambda outputs: None)
    for batch in settings.batches:
        executor.decode.eager(decode_values(executor.state, batch, settings.context), lambda outputs: None)


def _captured(executor: DeviceExecutor, way: str) -> Iterable[Captured]:
    for phase in executor.phases:
        if phase.graphs:
            yield Captured(
                way=way,
                phase=phase.phase.name,
                num_graphs=len(phase.graphs),
                seconds=sum(graph.capture_s for graph in phase.graphs),
                graph_bytes=sum(graph.nbytes for graph in phase.graphs),
                buffer_bytes=phase.phase.arena.nbytes,
            )


def _environment(model: Model, state: DeviceState, rates: Rates, settings: OfflineBenchSettings) -> dict[str, Any]:
    return describe_model(model) | {
        "weights_gb": round(model.parameter_bytes() / 1e9, 3),
        "sampling": state.sampling.name,
        "context": settings.context,
        "max_keys": state.max_keys,
        "block_size": state.block_size,
        "kv_gb": round(sum(part.nbytes for cache in state.caches for part in cache) / 1e9, 3),
        **asdict(rates),
    }

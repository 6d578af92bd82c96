"""Measures what graphs gain: prefill of a model with random weights, eager, piecewise and full, by number of tokens."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from saccade.bench.passes.offline_bench import bench_state
from saccade.bench.passes.pass_settings import GraphBenchSettings, OfflineBenchSettings
from saccade.bench.passes.timing import describe_model, free, latency_ms
from saccade.config import GraphSettings, Mode
from saccade.errors import ConfigError
from saccade.execution.language import prefill_phase
from saccade.execution.state import DeviceState
from saccade.graphs import Capacity, GraphRunner, copy_out
from saccade.kernels.dispatch import device_named, kernels_for
from saccade.layers.layer import Placement
from saccade.models.dummy import fill_with_noise
from saccade.models.model_config import Config
from saccade.models.registry import read_spec
from saccade.models.vlm import Model
from saccade.terminal import print_table

MIB = 2**20
ROUNDS = 9
MAX_REQUESTS = 8
GPU_TOKENS = (64, 128, 256, 406, 512, 1024, 2048, 4096)
CPU_TOKENS = (64, 128, 256, 406, 512, 1024)  # time grows with the square; larger ones take minutes
SHAPE = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "intermediate_size"),
)
SIZES = {"8b": (36, 4096, 32, 8, 128, 12288), "tiny": (4, 128, 4, 2, 32, 384)}


@dataclass(frozen=True, slots=True)
class GraphTimes:
    """One way to run one size. `ms` is the time until the result is ready, `cpu_ms` until the call returns."""

    tokens: int
    way: str
    ms: float
    cpu_ms: float
    capture_s: float
    graph_mib: float
    equals_eager: bool


@dataclass(frozen=True, slots=True)
class GraphBench:
    lines: tuple[GraphTimes, ...]
    held_mib: dict[str, float]  # arena and all graphs, by way; measured as device memory besides weights and caches
    environment: dict[str, Any]


def run_graph_bench(settings: GraphBenchSettings, progress: Callable[[str], None]) -> GraphBench:
    device = device_named(settings.device)
    size = settings.size if settings.size != "auto" else ("8b" if device.type == "cuda" else "tiny")
    if size not in SIZES:
        raise ConfigError(f"size is {size!r}; known are {', '.join(SIZES)} (--size)")
    tokens = settings.tokens or (GPU_TOKENS if device.type == "cuda" else CPU_TOKENS)
    progress(f"weights of size {size} on {device}")
    model = made_up_model(dict(zip(SHAPE, SIZES[size], strict=True)), settings.layers, device)
    state = bench_state(model, OfflineBenchSettings(tokens=tokens, batches=(MAX_REQUESTS,), context=1))
    lines: list[GraphTimes] = []
    held = {}
    for mode in Mode:
        before = _used_bytes(device)
        runner = _runner(model, state, tokens, mode)
        runner.capture_buckets(lambda done, total, key: progress(f"capture {key}"))
        nbytes = runner.phase.arena.nbytes + sum(graph.nbytes for graph in runner.graphs)  # all that a CPU tells
        held[mode.value] = (_used_bytes(device) - before if device.type == "cuda" else nbytes) / MIB
        lines.extend(_measure(runner, mode, progress))
        del runner
    lines.sort(key=lambda line: (line.tokens, ("eager", "piecewise", "full").index(line.way)))
    return GraphBench(tuple(lines), held, {"size": size} | describe_model(model))


def print_graph_bench(bench: GraphBench, console: Console) -> None:
    table = Table("tokens", "mode", "ms", "host ms", "capture s", "graph MiB", "equals eager")
    for line in bench.lines:
        figures = (f"{line.ms:.2f}", f"{line.cpu_ms:.2f}", f"{line.capture_s:.2f}", f"{line.graph_mib:.0f}")
        table.add_row(str(line.tokens), line.way, *figures, "yes" if line.equals_eager else "NO")
    print_table(console, table)
    for way, mib in bench.held_mib.items():
        console.print(f"{way}: {mib:.0f} MiB in use besides the weights (arena and all graphs)")


def made_up_model(size: dict[str, Any], layers: int, device: torch.device) -> Model:
    """A Qwen3-style model with random weights. The vocabulary is small because a prefill makes no use of it."""
    chosen = {"num_hidden_layers": layers} if layers else {}
    _, spec = read_spec(Config({"architectures": ["Qwen3ForCausalLM"], "vocab_size": 1024, **size, **chosen}))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Model(Placement(kernels=kernels_for(device, dtype), device=device, dtype=dtype), spec)
    fill_with_noise(model)
    model.place.kernels.compile(device, dtype)
    return model


def _runner(model: Model, state: DeviceState, tokens: tuple[int, ...], mode: Mode) -> GraphRunner:
    phase = prefill_phase(model, state, max(tokens))
    buckets = tuple(Capacity.of(tokens=count, requests=MAX_REQUESTS) for count in tokens)
    return GraphRunner(replace(phase, buckets=buckets), GraphSettings(mode=mode))


def _measure(runner: GraphRunner, mode: Mode, progress: Callable[[str], None]) -> list[GraphTimes]:
    """Times all graphs, and in full mode also eager runs with the same padding."""
    lines = []
    device = runner.phase.arena.device
    for graph in runner.graphs:
        bucket = graph.key.capacity
        progress(f"time {graph.key}")
        values, batch = runner.example_values(bucket), runner.example_for(bucket)
        expected = runner.eager(values, copy_out, at=bucket)["trunk"]
        equals = torch.equal(runner.replay(graph.key, batch, copy_out)["trunk"], expected)
        times = latency_ms(partial(runner.replay, graph.key, batch, lambda outputs: None), device, ROUNDS)
        lines.append(GraphTimes(bucket["tokens"], mode.value, *times, graph.capture_s, graph.nbytes / MIB, equals))
        if mode is Mode.FULL:
            times = latency_ms(partial(runner.eager, values, lambda outputs: None, at=bucket), device, ROUNDS)
            lines.append(GraphTimes(bucket["tokens"], "eager", *times, 0.0, 0.0, True))
    return lines


def _used_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    free(device)
    available, total = torch.cuda.mem_get_info(device)
    return total - available

"""What graphs bring: a decoder body run eagerly, in pieces and as one graph, by number of tokens.

Only attention is a fused kernel; all else is plain torch, so that the figures speak of graphs.
Shapes: T tokens, D width, H query heads, G key heads, K head width.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.config import GraphBenchSettings, GraphSettings, Mode
from saccade.errors import ConfigError
from saccade.graphs import Arena, Capacity, Frame, GraphRunner, Phase, Watched, boundaries, bridge, output, rows
from saccade.kernels.dispatch import Kernels, device_named, kernels_for

MIB = 2**20
ROUNDS = 9
NUM_SEGMENTS = 8
GPU_TOKENS = (64, 128, 256, 406, 512, 1024, 2048, 4096)
CPU_TOKENS = (64, 128, 256, 406, 512, 1024)  # time grows with the square of these, to minutes above


@dataclass(frozen=True, slots=True)
class Dimensions:
    layers: int
    width: int
    heads: int
    key_heads: int
    head_width: int
    mlp_width: int


SIZES = {
    "8b": Dimensions(layers=36, width=4096, heads=32, key_heads=8, head_width=128, mlp_width=12288),
    "tiny": Dimensions(layers=4, width=128, heads=4, key_heads=2, head_width=32, mlp_width=384),
}


@dataclass(frozen=True, slots=True)
class Line:
    """One way to run one size: time until the result is there, and how long the host was busy with it."""

    tokens: int
    way: str
    ms: float
    cpu_ms: float
    capture_s: float
    graph_mib: float
    equals_eager: bool


@dataclass(frozen=True, slots=True)
class GraphBench:
    lines: tuple[Line, ...]
    held_mib: dict[str, float]  # by way: arena and all graphs, measured as device memory beyond the weights
    environment: dict[str, Any]


def run_graph_bench(settings: GraphBenchSettings, progress: Callable[[str], None]) -> GraphBench:
    device = device_named(settings.device)
    size = settings.size if settings.size != "auto" else ("8b" if device.type == "cuda" else "tiny")
    if size not in SIZES:
        raise ConfigError(f"size is {size!r}; known are {', '.join(SIZES)} (--size)")
    tokens = settings.tokens or (GPU_TOKENS if device.type == "cuda" else CPU_TOKENS)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    progress(f"weights of size {size} on {device}")
    body = DecoderBody(SIZES[size], settings.layers or SIZES[size].layers, kernels_for(device, dtype), dtype, device)
    lines: list[Line] = []
    held = {}
    for mode in Mode:
        before = _used_bytes(device)
        runner = GraphRunner(_phase(body, tokens, dtype, device), GraphSettings(mode=mode))
        runner.capture_buckets(lambda done, total, key: progress(f"capture {key}"))
        held[mode.value] = (_used_bytes(device) - before) / MIB if device.type == "cuda" else _twin_mib(runner)
        lines.extend(_measure(runner, mode, progress, eager=mode is Mode.FULL))
        del runner
    lines.sort(key=lambda line: (line.tokens, ("eager", "piecewise", "full").index(line.way)))
    return GraphBench(tuple(lines), held, _environment(device, size, body, dtype))


class DecoderBody(nn.Module):
    """Causal decoder layers over packed segments; attention is called outside the pieces."""

    def __init__(
        self, dimensions: Dimensions, layers: int, kernels: Kernels, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.dimensions, self.kernels = dimensions, kernels
        width, mlp_width = dimensions.width, dimensions.mlp_width
        q_width = dimensions.heads * dimensions.head_width
        kv_width = dimensions.key_heads * dimensions.head_width
        self.split = (q_width, kv_width, kv_width)

        def weights(out: int, into: int) -> nn.ParameterList:
            made = (torch.randn(out, into, dtype=dtype, device=device) * into**-0.5 for _ in range(layers))
            return nn.ParameterList(nn.Parameter(weight, requires_grad=False) for weight in made)

        self.qkv, self.proj = weights(sum(self.split), width), weights(width, q_width)
        self.gate_up, self.down = weights(2 * mlp_width, width), weights(width, mlp_width)
        self.norm = nn.Parameter(torch.ones(width, dtype=dtype, device=device), requires_grad=False)

    def forward(self, frame: Frame) -> dict[str, Tensor]:
        x_TD = frame["x"]
        x_TD = x_TD.clone()
        for qkv, proj, gate_up, down in zip(self.qkv, self.proj, self.gate_up, self.down, strict=True):
            torch.mm(self._normed(x_TD), qkv.T, out=frame["qkv"])
            attended = frame.outside(self._attend, frame, out="attended", qkv=frame["qkv"])
            x_TD += F.linear(attended, proj)
            x_TD += self._mlp(x_TD, gate_up, down, frame["gate_up"])
        return {"y": self._normed(x_TD)}

    def _attend(self, frame: Frame, qkv: Tensor) -> Tensor:
        width = self.dimensions.head_width
        q_THK, k_TGK, v_TGK = (t.unflatten(1, (-1, width)) for t in qkv.split(self.split, dim=1))
        longest = frame.capacity["tokens"]
        return self.kernels.varlen_attention(q_THK, k_TGK, v_TGK, frame["cu"], longest, scale=width**-0.5, causal=True)

    def _normed(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.norm, 1e-6)

    def _mlp(self, x: Tensor, gate_up: Tensor, down: Tensor, wide: Tensor) -> Tensor:
        gate, up = torch.mm(self._normed(x), gate_up.T, out=wide).chunk(2, dim=1)
        return F.linear(F.silu(gate, inplace=True).mul_(up), down)


def _phase(body: DecoderBody, tokens: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Phase:
    width = body.dimensions.width
    buffers = [
        rows("x", ("tokens", width), dtype),
        boundaries("cu", of="tokens", count="segments"),
        bridge("qkv", ("tokens", sum(body.split)), dtype),
        bridge("attended", ("tokens", body.split[0]), dtype),
        bridge("gate_up", ("tokens", 2 * body.dimensions.mlp_width), dtype),  # the widest temporary, once for all
        output("y", ("tokens", width), dtype),
    ]

    def example(lengths: tuple[int, ...], rng: torch.Generator) -> dict[str, Any]:
        x = torch.randn(sum(lengths), width, generator=rng).to(device, dtype)
        return {"x": x, "cu": [sum(lengths[:i]) for i in range(len(lengths) + 1)]}

    return Phase(
        name="decoder",
        body=body,
        arena=Arena(buffers, {"tokens": max(tokens), "segments": NUM_SEGMENTS}, device),
        rows="tokens",
        buckets=tuple(Capacity.of(tokens=count, segments=NUM_SEGMENTS) for count in tokens),
        example=example,
        state=Watched.of_module(body),
    )


def _measure(runner: GraphRunner, mode: Mode, progress: Callable[[str], None], *, eager: bool) -> list[Line]:
    lines = []
    for graph in runner.graphs:
        tokens = graph.key.capacity["tokens"]
        progress(f"time {graph.key}")
        batch = runner.example_for(graph.key.capacity)
        values = {**batch.tensors, **batch.arrays}
        expected = runner.eager(values, _output)
        actual = runner.replay(graph.key, batch, _output)
        equal = torch.equal(actual, expected)
        ms, cpu_ms = _times(lambda key=graph.key, batch=batch: runner.replay(key, batch, _nothing), runner)  # type: ignore[misc]
        lines.append(Line(tokens, mode.value, ms, cpu_ms, graph.capture_s, graph.nbytes / MIB, equal))
        if eager:
            ms, cpu_ms = _times(lambda values=values: runner.eager(values, _nothing), runner)  # type: ignore[misc]
            lines.append(Line(tokens, "eager", ms, cpu_ms, 0.0, 0.0, True))
    return lines


def _times(call: Callable[[], object], runner: GraphRunner) -> tuple[float, float]:
    """Medians in ms: until the device is done, and until the call returns."""
    device = runner.phase.arena.device
    whole, host = [], []
    for _ in range(ROUNDS):
        _wait(device)
        started = perf_counter()
        call()
        returned = perf_counter()
        _wait(device)
        whole.append(perf_counter() - started)
        host.append(returned - started)
    return median(whole) * 1e3, median(host) * 1e3


def _output(outputs: Any) -> Tensor:
    return outputs["y"].clone()  # type: ignore[no-any-return]


def _nothing(outputs: Any) -> None:
    return None


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _used_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _twin_mib(runner: GraphRunner) -> float:
    return (runner.phase.arena.nbytes + sum(graph.nbytes for graph in runner.graphs)) / MIB


def _environment(device: torch.device, size: str, body: DecoderBody, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "size": size,
        "layers": len(body.qkv),
        "dtype": str(dtype).removeprefix("torch."),
        "attention": body.kernels.name,
    }

"""Decode of one row with other tiles, and with norms inside products. Run by hand on a GPU:

python -m tests.gpu.profile_single_rows                     FP8 and bfloat16, Qwen3-VL-8B's dimensions, random weights
python -m tests.gpu.profile_single_rows --only fp8          one of them
python -m tests.gpu.profile_single_rows --nodes             only where the time goes, without a search

Every variant is a whole decode pass in its own graph, so that kernels overlap as in an engine. Products are compared
with their oracles first, and the logits of each variant with those of the first.
"""

import json
import tempfile
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from saccade.bench.passes.offline_bench import WAYS, bench_executor, bench_state, decode_values, prefill_values
from saccade.bench.passes.pass_settings import OfflineBenchSettings, suited_to
from saccade.bench.passes.timing import step_ms
from saccade.execution.executor import DeviceExecutor
from saccade.graphs import GraphRunner
from saccade.kernels import fused_attention, reference_scaled, scaled, vectors
from saccade.kernels.dispatch import Kernels
from saccade.kernels.vectors import VectorTile
from saccade.kernels.weight import Inputs, Layout, Pending, Weight, new_weight
from saccade.models.quantization import Quantize
from saccade.models.weights import load_model
from tests.gpu.test_families import QWEN3_VL_8B

Tiles = Mapping[str, VectorTile]
T = VectorTile

WHOLE, HALF = 4096, 2048
PRODUCTS = {  # columns of the result, inner width, whether it is gated
    "qkv": (6144, 4096, False),
    "out": (4096, 4096, False),
    "gate": (12288, 4096, True),
    "down": (4096, 12288, False),
}
TILES: dict[Layout, dict[str, list[VectorTile]]] = {
    Layout.ROWS: {
        "qkv": [T(4, 4, WHOLE), T(2, 4, WHOLE), T(4, 8, WHOLE)],
        "out": [T(4, 4, WHOLE), T(2, 4, WHOLE), T(2, 1, WHOLE), T(4, 8, WHOLE)],
        "gate": [T(2, 4, WHOLE), T(4, 4, WHOLE), T(2, 8, WHOLE), T(4, 8, WHOLE)],
        "down": [T(2, 4, WHOLE), T(4, 4, WHOLE), T(2, 8, WHOLE), T(2, 4, HALF), T(4, 4, HALF)],
    },
    Layout.PLAIN: {
        "qkv": [T(2, 4, WHOLE), T(4, 8, WHOLE)],
        "out": [T(2, 4, WHOLE), T(2, 8, WHOLE)],
        "gate": [T(2, 4, WHOLE), T(2, 8, WHOLE)],
        "down": [T(2, 4, WHOLE), T(2, 8, WHOLE), T(2, 4, HALF), T(4, 4, HALF)],
    },
}
HEADS = [T(2, 4, WHOLE), T(2, 8, WHOLE), T(2, 4, HALF)]  # for the product with the vocabulary, in bfloat16
VOCABULARY = 151936
MAX_ERROR = 0.01  # of a bfloat16 product, relative, by norm
ROUNDS = 9


@dataclass(frozen=True)
class Variant:
    """Whether products norm their row, into how many programs keys are split, and the tiles of products."""

    pends: bool
    splits: int = 32
    tiles: Tiles = field(default_factory=dict)

    def __str__(self) -> str:
        tiles = ", ".join(f"{name} {tile.columns}x{tile.num_warps}w{tile.block}" for name, tile in self.tiles.items())
        return " ".join(("pending" if self.pends else "norms", str(self.splits), tiles))

    @contextmanager
    def applied(self) -> Iterator[None]:
        own = vectors.tile_for

        def tile_for(num_columns: int, inner: int, layout: Layout, *, is_gated: bool) -> VectorTile:
            name = next((n for n, shape in PRODUCTS.items() if shape == (num_columns, inner, is_gated)), "")
            return self.tiles.get(name) or own(num_columns, inner, layout, is_gated=is_gated)

        with (
            mock.patch.object(fused_attention, "_MAX_SPLITS", self.splits),
            mock.patch.object(vectors, "tile_for", tile_for),
            mock.patch.object(Kernels, "rms_inputs", rms_inputs(pends=self.pends)),
        ):
            yield


NORMS_APART = Variant(pends=False)


def rms_inputs(*, pends: bool) -> Callable[..., tuple[Inputs, Tensor]]:
    """A `Kernels.rms_inputs` that leaves the norm of every single row to its product, or to a separate kernel."""

    def made(
        self: Kernels,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        feeds: Weight | None,
        *,
        offset: float,
    ) -> tuple[Inputs, Tensor]:
        if pends and feeds is not None and x.shape[0] == 1:
            total = x if residual is None else torch.empty_like(x)
            return Pending(x, residual, total, weight, eps, offset), total
        if feeds is not None and feeds.needs_scaled(x.shape[0]):
            return self.scaled_rms_norm(x, residual, weight, eps, feeds, offset=offset)
        if residual is None:
            return self.rms_norm(x, weight, eps, offset=offset), x
        return self.add_rms_norm(x, residual, weight, eps, offset=offset)

    return made


class Subject:
    """A model, and its decode pass of one row."""

    def __init__(self, folder: str, layout: Layout, device: str) -> None:
        self.layout = layout
        chosen = OfflineBenchSettings(load_format="dummy", device=device, tokens=(406,), batches=(1,))
        settings = suited_to(device, chosen)
        model = load_model(
            folder,
            device=device,
            dtype=torch.bfloat16,
            load_format="dummy",
            quantize=Quantize(language="fp8") if layout is Layout.ROWS else Quantize(),
        )
        self.executor: DeviceExecutor = bench_executor(bench_state(model, settings), settings, WAYS["full"])
        self.decoding = decode_values(self.executor.state, 1, settings.context)
        self.prefilling = prefill_values(self.executor, 406)
        self.logits: Tensor | None = None
        captured(self.executor.decode, self.decoding)  # fills caches with its example, as all later captures do
        run(captured(self.executor.decode, self.decoding), self.decoding)

    def measure(self, variant: Variant) -> str:
        """A line with milliseconds, twice, and how far the logits are from those of the first variant."""
        device = self.executor.state.model.place.device
        with variant.applied():
            runner = captured(self.executor.decode, self.decoding)
            times = [step_ms(lambda: run(runner, self.decoding), device, ROUNDS)[0] for _ in range(2)]
        logits = self.executor.state.logits[:1].double().clone()
        self.logits = logits if self.logits is None else self.logits
        self.last_ms = min(times)
        off = float((logits - self.logits).norm() / self.logits.norm())
        return f"{times[0]:7.4f} {times[1]:7.4f} ms  logits off by {off:.4f}  {variant}"


def run(runner: GraphRunner, values: Mapping[str, Any]) -> None:
    runner.run(values, lambda outputs: None)


def captured(runner: GraphRunner, values: Mapping[str, Any]) -> GraphRunner:
    """A runner with only the graph of this batch."""
    batch = runner.phase.arena.admit(values)
    bucket = runner.catalogue.shape.bucket_for(batch.sizes)
    assert bucket is not None, f"no bucket holds {batch.sizes}"
    made = GraphRunner(replace(runner.phase, buckets=(bucket,)), runner.settings)
    made.capture_buckets()
    return made


def search(subject: Subject) -> tuple[Variant, list[str]]:
    """Tries norms and key splits first, then tiles, one product at a time with the best so far for the others."""
    lines: list[str] = []
    best, best_ms = NORMS_APART, float("inf")

    def attempt(variant: Variant) -> None:
        nonlocal best, best_ms
        line = subject.measure(variant)
        print(line, flush=True)
        lines.append(line)
        if subject.last_ms < best_ms:
            best, best_ms = variant, subject.last_ms

    attempt(best)
    attempt(replace(best, pends=True))
    attempt(replace(best, splits=16))
    for name, tiles in TILES[subject.layout].items():
        for tile in tiles[1:]:
            attempt(replace(best, tiles={**best.tiles, name: tile}))
    attempt(replace(best, pends=not best.pends))  # which is better may depend on tiles
    return best, lines


def check_products(layout: Layout, device: str) -> list[str]:
    """Compares every tile with the oracle; a line for each wrong one."""
    found: list[str] = []
    for name, (num_columns, inner, is_gated) in PRODUCTS.items():
        weight = new_weight(
            num_columns * (1 + is_gated), inner, layout=layout, dtype=torch.bfloat16, device=torch.device(device)
        )
        weight.fill(torch.randn(*weight.shape, device=device, dtype=torch.bfloat16) * inner**-0.5)
        for tile in TILES[layout][name]:
            x, residual, norm = (torch.randn(n, inner, device=device, dtype=torch.bfloat16) for n in (1, 1, 1))
            for added in (None, residual):
                totals = [torch.full_like(x, float("nan")) for _ in range(2)]
                pair = [Pending(x, added, total, norm[0], 1e-6, 0.0) for total in totals]
                with replace(NORMS_APART, tiles={name: tile}).applied():
                    kernels, oracles = ((m.pending_gated_linear, m.pending_linear) for m in (scaled, reference_scaled))
                    y = (kernels[0] if is_gated else kernels[1])(pair[0], weight)
                    right = (oracles[0] if is_gated else oracles[1])(pair[1], weight)
                off = float((y - right).float().norm() / right.float().norm())
                if not off < MAX_ERROR or not torch.equal(*(total.nan_to_num() for total in totals)):
                    found.append(f"WRONG: {name} {layout.value} {tile}: off by {off}")
    return found or [f"{layout.value}: every tile agrees with its oracle"]


def time_heads(device: str) -> list[str]:
    """The product of one row with the vocabulary."""
    x = torch.randn(1, 4096, device=device, dtype=torch.bfloat16)
    weights = [torch.randn(VOCABULARY, 4096, device=device, dtype=torch.bfloat16) for _ in range(2)]
    lines = []

    def timed(name: str, call: Any) -> None:
        graph = torch.cuda.CUDAGraph()
        call(weights[0])
        with torch.cuda.graph(graph):
            for weight in weights:
                call(weight)
        lines.append(f"head {name}: {step_ms(graph.replay, torch.device(device), ROUNDS)[0] / 2 * 1e3:.1f} us")

    timed("torch", lambda weight: torch.nn.functional.linear(x, weight))
    for tile in HEADS:
        with mock.patch.object(vectors, "tile_for", lambda *a, tile=tile, **k: tile):
            timed(f"{tile.columns}x{tile.num_warps}w{tile.block}", lambda weight: vectors.vector_linear(x, weight))
    return lines


def nodes(title: str, runner: GraphRunner, values: Mapping[str, Any], variant: Variant) -> list[str]:
    """Kernels by total time, and those of about one layer in order: gap to the one before, duration, name."""
    with variant.applied():
        made = captured(runner, values)
        for _ in range(3):
            run(made, values)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            run(made, values)
            torch.cuda.synchronize()
    events = sorted(
        (e.time_range.start, e.time_range.end, e.name)
        for e in recorded.events() or []
        if str(e.device_type).endswith("CUDA")
    )
    totals: dict[str, list[float]] = defaultdict(list)
    end, gaps, ordered = events[0][0], 0.0, []
    for start, stop, name in events:
        totals[name].append(stop - start)
        gaps += max(0.0, start - end)
        ordered.append(f"    {start - end:7.2f} {stop - start:8.2f}  {name[:70]}")
        end = max(end, stop)
    lines = [f"{title} {variant}: {len(events)} nodes, {end - events[0][0]:.1f} us, gaps {gaps:.1f} us"]
    for name, times in sorted(totals.items(), key=lambda item: -sum(item[1]))[:14]:
        lines.append(f"  {sum(times):9.1f} us {len(times):4} x {sum(times) / len(times):8.2f}  {name[:70]}")
    middle = len(ordered) // 2
    return [*lines, "  in the middle:", *ordered[middle : middle + 14], "  at the end:", *ordered[-8:]]


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["fp8", "bf16"])
    parser.add_argument("--nodes", action="store_true")
    parser.add_argument("--device", default="cuda")
    flags = parser.parse_args()
    layouts = {"fp8": Layout.ROWS, "bf16": Layout.PLAIN}
    closing: list[str] = []
    with tempfile.TemporaryDirectory() as made, torch.no_grad():
        (Path(made) / "config.json").write_text(json.dumps(QWEN3_VL_8B))
        for name in [flags.only] if flags.only else layouts:
            layout = layouts[name]
            print(*check_products(layout, flags.device), sep="\n", flush=True)
            subject = Subject(made, layout, flags.device)
            best = Variant(pends=layout is Layout.PLAIN)
            if not flags.nodes:
                best, lines = search(subject)
                closing += [f"-- {name}, decode of one row", *lines, f"best: {best}"]
            runners = subject.executor
            for title, runner, values, variant in (
                (f"{name} decode", runners.decode, subject.decoding, NORMS_APART),
                (f"{name} decode", runners.decode, subject.decoding, best),
                (f"{name} prefill", runners.prefill, subject.prefilling, best),
            ):
                print(*nodes(title, runner, values, variant), sep="\n", flush=True)
            del subject, runners, runner
            torch.cuda.empty_cache()
    print(*closing, *time_heads(flags.device), sep="\n")


if __name__ == "__main__":
    main()

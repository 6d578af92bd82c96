"""Measures the host's work for starting an engine: `python -m tests.execution.start_time [--against SRC]`.

This is the engine that a Hopper GPU would get, at the depth, buckets and limits of Qwen3-VL-8B (but narrow). Its
passes run the host code of its kernels: Triton looks up compiled kernels and binds arguments as usual, but nothing is
compiled or launched. Graphs, copies, fills, and the products and attention of other packages do nothing and are only
counted, so their host time is missing. Graphs are captured, verified and audited as on a GPU; their nodes are the
launches of Triton kernels.

Prints medians over runs: CPU microseconds and launches of one run of a body, of its warm-up, and of capturing it; CPU
seconds for capturing all graphs, for the short verification, and passes in it. `--against` measures other sources,
such as another checkout's `src`, in turns with these."""

import argparse
import gc
import importlib
import json
import os
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

import saccade
from saccade.execution.assembly import new_executor
from saccade.execution.executor import DeviceExecutor
from saccade.execution.verification import check_graphs
from saccade.graphs import Frame, GraphRunner
from saccade.graphs.audit import fill_problems
from saccade.graphs.frame import run_body
from saccade.graphs.nodes import Node
from saccade.kernels import dispatch
from saccade.kernels.dispatch import Kernels, SamplingKernels
from saccade.models.weights import load_model
from tests.execution.host_time import Figures, Worker, narrow_settings

MODULE = "tests.execution.start_time"
ROWS = {"vision": (327,), "prefill": (64, 512), "decode": (1, 64), "head": (32,), "sample": (32,)}
NUM_BODY_RUNS = 7
Launch = tuple[str, tuple[int, ...], list[Any]]  # of a kernel: its name, its grid, its arguments


class Device:
    """Stands in for a GPU, and counts what it is given."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.launches: list[Launch] | None = None  # since a graph was begun whose nodes are to be kept
        self.keeps_nodes = False
        self.memory: list[tuple[int, int]] = []

    def called(self, *args: Any, **how: Any) -> None:
        self.num_calls += 1

    def product(self, x: Tensor, weight: Tensor, *args: Any, out: Tensor | None = None, **how: Any) -> Tensor:
        self.called()
        return x.new_empty(*x.shape[:-1], weight.shape[0]) if out is None else out

    def attention(self, q: Tensor, *args: Any, **how: Any) -> Tensor:
        self.called()
        return torch.empty_like(q)

    def products(self) -> Any:
        module = importlib.import_module("saccade.kernels.products")
        return module.HopperProducts(self.called, self.called, {tile: tile for _, tile in module.EVERY_TILE})

    def flash_attention(self) -> Any:
        return importlib.import_module("saccade.kernels.adapters").FlashAttention(self.attention)

    def copied(self, tensor: Tensor) -> Tensor:
        self.called()
        return tensor

    def launched(self, name: str, *args: Any) -> None:
        self.called()
        if self.launches is not None:
            self.launches.append(
                (name, args[:3], [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args[9:]])
            )

    @contextmanager
    def keeping_nodes(self) -> Iterator[None]:
        self.keeps_nodes = True
        yield
        self.keeps_nodes = False

    def begin(self) -> None:
        self.launches = [] if self.keeps_nodes else None

    def end(self) -> "Graph":
        launches, self.launches = self.launches or [], None
        return Graph(self, launches)

    def compiled(self, source: Any, **how: Any) -> Any:
        """A kernel that Triton finds compiled."""
        run = partial(self.launched, source.fn.fn.__name__)
        return SimpleNamespace(run=run, function=0, packed_metadata=(), launch_metadata=lambda *args: None)

    def holds(self, address: int) -> bool:
        at = bisect_right(self.memory, (address, 2**64)) - 1
        return at >= 0 and address < self.memory[at][1]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Enter it before kernels are imported."""
        triton: Any = importlib.import_module("triton")
        target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
        driver = SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
        )
        places: dict[Any, Any] = {
            "torch.nn.functional.linear": self.product,
            "torch.mm": lambda x, weight, out: self.product(x, weight, out=out),
            "torch.addmm": lambda bias, x, weight, out: self.product(x, weight, out=out),
            "torch._addmm_activation": lambda bias, x, weight, use_gelu: self.product(x, weight.t()),
            "torch.nn.functional.embedding": lambda ids, table: table.new_empty(*ids.shape, table.shape[1]),
            "torch.Tensor.copy_": lambda tensor, *args, **how: self.copied(tensor),
            "torch.Tensor.fill_": lambda tensor, *args: self.copied(tensor),
            "torch.Tensor.index_fill_": lambda tensor, *args: self.copied(tensor),
            "torch.Tensor.nan_to_num": lambda tensor: self.attention(tensor),
            "torch.Tensor.normal_": lambda tensor, *args, **how: self.copied(tensor),
            "torch.randn": lambda *shape, generator, **how: torch.empty(*shape, **how),
            "triton.compiler.compile": self.compiled,
            "saccade.kernels.dispatch.use_private_kernel_cache": lambda: None,
            "saccade.kernels.overlap._can_overlap": lambda device: True,
            "saccade.kernels.products.load_products": self.products,
            "saccade.kernels.adapters.load_flash_attention": self.flash_attention,
            "saccade.graphs.audit.fill_problems": lambda *args: fill_problems(*args)[:0],  # nothing was filled
            "saccade.graphs.audit._is_cpu": lambda runner: False,
            "saccade.graphs.recorded.RecordedLane.begin": lambda lane: self.begin(),
            "saccade.graphs.recorded.RecordedLane.end": lambda lane: self.end(),
            "saccade.graphs.recorded.RecordedLane.keeping_nodes": lambda lane: self.keeping_nodes(),
            "saccade.graphs.recorded.RecordedLane.memory": lambda lane: ([], self.memory),
        }
        with ExitStack() as stack:
            stack.enter_context(patch.dict(os.environ, TRITON_DEFAULT_FP_FUSION="1"))  # else Triton warns
            stack.enter_context(patch("torch._C._cuda_getCurrentRawStream", lambda device: 0, create=True))
            stack.enter_context(patch.object(triton.runtime.driver, "_active", driver))
            for name, value in places.items():
                stack.enter_context(patch(name, value))
            yield


class Graph:
    """Stands in for a piece of a captured graph."""

    def __init__(self, device: Device, launches: Sequence[Launch]) -> None:
        self._device, self._launches = device, launches

    def __call__(self) -> None:
        self._device.called()

    def nodes(self) -> list[Node]:
        return [Node(name, {"grid": grid}, raw=self._raw(values)) for name, grid, values in self._launches]

    def _raw(self, values: Sequence[Any]) -> dict[str, bytes]:
        """Addresses have eight bytes, numbers four. Temporaries have none, as no allocator keeps them in place."""
        found = {}
        for i, value in enumerate(values):
            if isinstance(value, int):
                is_address = value >= 2**32
                kept = value if not is_address or self._device.holds(value) else 0
                found[f"argument {i}"] = kept.to_bytes(8 if is_address else 4, "little", signed=not is_address)
        return found


def hopper_kernels() -> tuple[Kernels, SamplingKernels]:
    fused = importlib.import_module("saccade.kernels.fused_sampling")
    sampling = {name: getattr(fused, name) for name in SamplingKernels.kernel_names()}
    return dispatch._cuda_kernels((9, 0), torch.bfloat16), SamplingKernels("triton", sampling)


def new_rig(folder: Path) -> DeviceExecutor:
    """A narrow executor, set up as on a GPU, without graphs."""
    sizes, settings = narrow_settings(folder)
    kernels, sampling = hopper_kernels()
    model = load_model(folder, dtype=torch.bfloat16, load_format="dummy", kernels=kernels)
    return new_executor(model, sizes, settings, sampling)


def memory_of(runner: GraphRunner) -> list[tuple[int, int]]:
    """Every storage that a phase uses, as if a GPU's allocator had kept each apart."""
    tensors = (*runner.phase.arena.storages().values(), *runner.watched.values())
    storages = [tensor.untyped_storage() for tensor in tensors]
    return [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]


class Rig:
    """An executor, and what is measured with it. All graphs are captured when it is made."""

    def __init__(self, folder: Path, device: Device) -> None:
        self._device, self._executor = device, new_rig(folder)
        device.memory = sorted({each for runner in self._executor.phases for each in memory_of(runner)})
        self._executor.capture()
        self._runners = {runner.phase.name: runner for runner in self._executor.phases}
        self.cases: dict[str, Callable[[], Figures]] = {
            f"{name}, {rows} rows": partial(self._body, self._runners[name], rows)
            for name, sizes in ROWS.items()
            for rows in sizes
        }
        self.cases |= {"all captures": self._capture, "short verification": self._verify}

    def _body(self, runner: GraphRunner, rows: int) -> Figures:
        phase = runner.phase
        bucket = next(one for one in phase.buckets if one[phase.rows] == rows)
        key, example = runner.catalogue.key(bucket), runner.example_for(bucket)

        def run(*, is_warmup: bool) -> None:
            run_body(phase.body, Frame(phase.arena, bucket, is_warmup=is_warmup))

        def capture() -> None:
            phase.arena.fill(example, bucket)
            runner.record(key)

        with torch.no_grad():
            whole = self._measure(partial(run, is_warmup=False), NUM_BODY_RUNS)
            warmup = self._measure(partial(run, is_warmup=True), NUM_BODY_RUNS)
        both = self._measure(capture, NUM_BODY_RUNS)
        return {
            "body us": whole[0] * 1e6,
            "launches": whole[1],
            "warm-up us": warmup[0] * 1e6,
            "capture us": both[0] * 1e6,
        }

    def _capture(self) -> Figures:
        seconds, calls = self._measure(self._executor.capture)
        num_graphs = sum(len(runner.graphs) for runner in self._executor.phases)
        return {"s": seconds, "graphs": num_graphs, "calls to the device": calls}

    def _verify(self) -> Figures:
        runs = 0

        def counted(body: Callable[..., Any], frame: Frame) -> None:
            nonlocal runs
            runs += 1
            run_body(body, frame)

        with patch("saccade.graphs.runner.run_body", counted), patch("saccade.graphs.piecewise.run_body", counted):
            seconds, calls = self._measure(lambda: check_graphs(self._executor))
        return {"s": seconds, "runs of a body": runs, "calls to the device": calls}

    def _measure(self, run: Callable[[], object], num_runs: int = 1) -> tuple[float, int]:
        """Median CPU seconds, and calls to the device of one run."""
        times = []
        gc.collect()
        gc.disable()
        for _ in range(num_runs):
            self._device.num_calls = 0
            started = time.thread_time_ns()
            run()
            times.append(time.thread_time_ns() - started)
        gc.enable()
        return float(np.median(times)) / 1e9, self._device.num_calls


def work() -> None:
    """Measures the case that each line of standard input names."""
    torch.set_num_threads(1)
    device = Device()
    with tempfile.TemporaryDirectory() as folder, device.installed():
        rig = Rig(Path(folder), device)
        print(json.dumps(list(rig.cases)), flush=True)
        for line in sys.stdin:
            [name] = json.loads(line)
            print(json.dumps(rig.cases[name]()), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--against", type=Path, action="append", default=[], help="other sources to compare with")
    parser.add_argument("--case", action="append", help="only this one")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.worker:
        work()
        return 0
    sources = [Path(saccade.__file__).parents[1], *flags.against]
    with ExitStack() as stack:
        workers = [stack.enter_context(closing(Worker(src, MODULE))) for src in sources]
        for case in flags.case or workers[0].cases:
            found = [[worker.measure(case) for worker in workers] for _ in range(flags.runs)]
            print(case)
            for src, ones in zip(sources, zip(*found, strict=True), strict=True):
                medians = {name: float(np.median([one[name] for one in ones])) for name in ones[0]}
                print(f"  {src}: " + ", ".join(f"{value:,.4g} {name}" for name, value in medians.items()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Times all-reduce: starts the ranks, reads the JSON lines of rank 0, and stops all ranks."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from time import monotonic
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from saccade.bench.passes.pass_settings import AllReduceBenchSettings, suited_to
from saccade.config import SHARED_GPU, worker_environment
from saccade.errors import ConfigError
from saccade.kernels.dispatch import device_named
from saccade.terminal import print_table

LIMIT_S = 1800.0
GRACE_S = 3.0  # after one rank fails, time for the others to report what they saw
TAIL_LINES = 20
RANK = "saccade.bench.passes.allreduce_rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceLine:
    """One algorithm at one size. `is_taken` says whether a model would use this algorithm at this size."""

    rows: int
    nbytes: int
    algorithm: str
    graph_us: float
    eager_us: float
    is_taken: bool
    is_right: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceBench:
    lines: tuple[AllReduceLine, ...]
    is_shared: bool  # all ranks are on one GPU
    environment: dict[str, Any]


def run_allreduce_bench(settings: AllReduceBenchSettings, progress: Callable[[str], None]) -> AllReduceBench:
    device = device_named(settings.device)
    settings = suited_to(device.type, settings)
    is_shared = device.type == "cuda" and torch.cuda.device_count() < settings.ranks
    devices = [rank_device(device, rank, is_shared) for rank in range(settings.ranks)]
    progress(f"{settings.ranks} ranks on {', '.join(dict.fromkeys(devices))}")
    lines, said = [], dict[str, Any]()
    with TemporaryDirectory() as name, _ranks(settings, devices, Path(name), is_shared) as heard:
        for message in heard:
            if "line" in message:
                lines.append(AllReduceLine(**message["line"]))
                progress(f"{lines[-1].rows} rows, {lines[-1].algorithm}")
            said |= message.get("environment", {})
    environment = {"ranks": settings.ranks, "width": settings.width, "dtype": settings.dtype, **said}
    return AllReduceBench(lines=tuple(lines), is_shared=is_shared, environment=environment)


def print_allreduce_bench(bench: AllReduceBench, console: Console) -> None:
    table = Table("rows", "KiB", "algorithm", "graph us", "eager us", "chosen", "correct")
    for line in bench.lines:
        figures = (f"{line.graph_us:.1f}", f"{line.eager_us:.1f}")
        marks = ("yes" if line.is_taken else "", "yes" if line.is_right else "NO")
        table.add_row(str(line.rows), f"{line.nbytes / 1024:g}", line.algorithm, *figures, *marks)
    print_table(console, table)
    if bench.is_shared:
        ranks = bench.environment["ranks"]
        console.print(f"{ranks} ranks shared one GPU, so the times mean nothing; only the sums were checked.")


def rank_device(device: torch.device, rank: int, is_shared: bool) -> str:
    if device.type == "cpu":
        return "cpu"
    return f"cuda:{(device.index or 0) if is_shared else rank}"


@contextmanager
def _ranks(
    settings: AllReduceBenchSettings, devices: list[str], folder: Path, is_shared: bool
) -> Iterator[Iterator[dict[str, Any]]]:
    """Yields an iterator over the messages of rank 0. On exit all ranks have ended; a failed rank is an error."""
    environment = worker_environment() | ({SHARED_GPU: "1"} if is_shared else {})
    outputs = [folder / f"rank {rank}" for rank in range(settings.ranks)]
    processes: list[subprocess.Popen[str]] = []
    is_over = Event()
    try:
        for rank, (device, output) in enumerate(zip(devices, outputs, strict=True)):
            words = [json.dumps(asdict(settings)), str(rank), device, str(folder / "store")]
            command = [sys.executable, "-m", RANK, *words]
            with output.open("w") as errors:
                told = subprocess.PIPE if rank == 0 else errors
                process = subprocess.Popen(command, env=environment, stdout=told, stderr=errors, text=True, bufsize=1)
            processes.append(process)
        Thread(target=_watch, args=(processes, is_over), daemon=True).start()
        assert processes[0].stdout is not None
        yield (json.loads(line) for line in processes[0].stdout if line.startswith("{"))
        for process in processes:
            process.wait()
    finally:
        is_over.set()
        _end(processes)
        if processes and processes[0].stdout is not None:
            processes[0].stdout.close()
    _raise_if_failed(processes, outputs)


def _watch(processes: list[subprocess.Popen[str]], is_over: Event) -> None:
    """Stops all ranks when one fails, because the others would wait for it forever, or when time is up."""
    deadline = monotonic() + LIMIT_S
    while not is_over.wait(0.1):
        if any(process.poll() for process in processes) or monotonic() > deadline:
            is_over.wait(GRACE_S)
            _end(processes)
            return


def _end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()


def _raise_if_failed(processes: list[subprocess.Popen[str]], outputs: list[Path]) -> None:
    """Reports the rank that failed first: one that only lost its peer ends with a connection error."""
    failed = [rank for rank, process in enumerate(processes) if process.returncode]
    if failed:
        tails = {rank: outputs[rank].read_text(errors="replace").splitlines()[-TAIL_LINES:] for rank in failed}
        rank = next((r for r in failed if tails[r] and "Connection" not in tails[r][-1]), failed[0])
        lines = "\n".join(tails[rank])
        raise ConfigError(f"rank {rank} of {len(processes)} ended with {processes[rank].returncode}:\n{lines}")

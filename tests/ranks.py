"""Runs cases in several processes that are the ranks of one group.

`python -m tests.ranks ...` is one rank. A module lists its cases in `CASES`: functions that take the groups of their
rank and raise if something is wrong. All ranks run all cases in the same order, because starting them takes seconds.
"""

import argparse
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep

import torch
from torch import Tensor

from saccade.layers.connect import connect
from saccade.layers.parallel import Groups

Case = Callable[[Groups], None]
ROOT = Path(__file__).parent.parent
TAIL = 6000  # characters of a rank's output to show
GRACE_S = 5.0  # for the other ranks to report an error after one fails


def assert_near(found: Tensor, right: Tensor, tolerance: float) -> None:
    """Replaces torch.testing, whose first comparison spends a second on imports in every rank."""
    assert found.shape == right.shape, (found.shape, right.shape)
    assert torch.allclose(found, right, atol=tolerance, rtol=tolerance), (found, right)


def run_cases(
    size: int, module: str, *, device: str = "cpu", stall_s: float = 300, variables: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The error of each case; empty if all ranks completed it. Ranks that finish no case for `stall_s` are killed. No
    process is left behind."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        ranks = [_start(rank, size, module, device, folder, variables or {}) for rank in range(size)]
        try:
            _wait(ranks, folder, stall_s)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return _found(module, folder, ranks)


def _start(
    rank: int, size: int, module: str, device: str, folder: Path, variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.ranks", str(rank), str(size), module, device, str(folder)]
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = (
        os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"} | dict(variables)
    )
    with (folder / f"output {rank}").open("wb") as output:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)


def _wait(ranks: list[subprocess.Popen[bytes]], folder: Path, stall_s: float) -> None:
    """Waits until all have ended, one has failed and the others had a moment to notice, or no case finishes in time."""
    deadline, done = monotonic() + stall_s, 0
    while monotonic() < deadline and any(process.poll() is None for process in ranks):
        if any(process.poll() for process in ranks):
            deadline = min(deadline, monotonic() + GRACE_S)
        elif (now := sum(len(_lines(folder / f"done {rank}")) for rank in range(len(ranks)))) > done:
            deadline, done = monotonic() + stall_s, now
        sleep(0.05)


def _found(module: str, folder: Path, ranks: list[subprocess.Popen[bytes]]) -> dict[str, str]:
    done = [_lines(folder / f"done {rank}") for rank in range(len(ranks))]
    cases = list(importlib.import_module(module).CASES)
    first = next((case for case in cases if not all(case in lines for lines in done)), None)
    output = "\n".join(
        f"--- rank {rank}, exit {process.returncode} ---\n{(folder / f'output {rank}').read_text()[-TAIL:]}"
        for rank, process in enumerate(ranks)
    )
    return {
        case: ""
        if all(case in lines for lines in done)
        else (f"{case} did not end on all ranks\n{output}" if case == first else f"not run: {first} failed before it")
        for case in cases
    }


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, kind in (("rank", int), ("size", int), ("module", str), ("device", str), ("folder", Path)):
        parser.add_argument(name, type=kind)
    flags = parser.parse_args()
    device = torch.device(flags.device)
    cases: Mapping[str, Case] = importlib.import_module(flags.module).CASES
    groups = connect(rank=flags.rank, size=flags.size, store=flags.folder / "store", device=device, timeout_s=120)
    with torch.no_grad(), (flags.folder / f"done {flags.rank}").open("w", buffering=1) as done:
        for name, case in cases.items():
            begun = monotonic()
            case(groups)
            print(name, file=done)
            print(f"{name}: {monotonic() - begun:.1f} s", flush=True)
    groups.language.barrier()
    groups.close()


if __name__ == "__main__":
    main()

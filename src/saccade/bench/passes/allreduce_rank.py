"""One rank of `saccade bench allreduce`: `python -m saccade.bench.passes.allreduce_rank SETTINGS RANK DEVICE STORE`.
Rank 0 prints its measurements as lines of JSON."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from saccade.bench.passes.pass_settings import AllReduceBenchSettings
from saccade.bench.passes.timing import wait
from saccade.graphs.lane import lane_for
from saccade.kernels.collectives import Collectives
from saccade.layers.connect import connect, nccl_beside
from saccade.layers.parallel import ParallelGroup
from saccade.machine import usable_cores

NUM_WARM_UPS, NUM_SUMS = 2, 8  # warm-up runs before the timed ones; sums per run
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2}

Tell = Callable[[dict[str, Any]], None]
Sum = Callable[[Tensor, Tensor], Tensor]


def main(words: list[str]) -> None:
    values: dict[str, Any] = json.loads(words[0])
    settings = AllReduceBenchSettings(**values | {"rows": tuple(values["rows"])})
    rank, device = int(words[1]), torch.device(words[2])
    if device.type == "cpu":
        torch.set_num_threads(max(1, usable_cores() // settings.ranks))
    groups = connect(rank=rank, size=settings.ranks, store=Path(words[3]), device=device)
    with torch.no_grad():
        RankBench(groups.language, device, settings, _tell if rank == 0 else lambda message: None).run()
    groups.language.barrier()
    groups.close()


def _tell(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


class RankBench:
    def __init__(
        self, group: ParallelGroup, device: torch.device, settings: AllReduceBenchSettings, tell: Tell
    ) -> None:
        assert group.collectives is not None
        self._group, self._device, self._settings, self._tell = group, device, settings, tell
        self._collectives: Collectives = group.collectives
        self._dtype: torch.dtype = getattr(torch, settings.dtype)

    def run(self) -> None:
        settings = self._settings
        self._group.reserve(max(settings.rows) * settings.width * self._dtype.itemsize)
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "CPU"
        backend = self._group.describe()["backend"]
        self._tell({"environment": {"device": name, "backend": backend, "torch": torch.__version__}})
        sums: dict[str, Sum] = {
            each: partial(self._collectives.all_reduce, algorithm=each) for each in self._collectives.algorithms
        }
        if nccl := nccl_beside(self._group, self._device):
            sums["nccl"] = nccl.all_reduce
        for rows in settings.rows:
            for algorithm, call in sums.items():
                self._tell({"line": self._line(rows, algorithm, call)})

    def _line(self, rows: int, algorithm: str, call: Sum) -> dict[str, Any]:
        shape = (rows, self._settings.width)
        target = torch.empty(shape, dtype=self._dtype, device=self._device)
        is_right = self._is_right(shape, call, target)
        place = self._group.staging(shape, self._dtype)
        staged = target.clone() if place is None or algorithm == "nccl" else place
        run = partial(call, staged, target)
        graph = self._captured(run)
        return {
            "rows": rows,
            "nbytes": target.nbytes,
            "algorithm": algorithm,
            "graph_us": self._microseconds(graph) / NUM_SUMS,
            "eager_us": self._microseconds(lambda: [run() for _ in range(NUM_SUMS)]) / NUM_SUMS,
            "is_taken": algorithm == self._collectives.taken(target.nbytes),
            "is_right": is_right,
        }

    def _is_right(self, shape: tuple[int, int], call: Sum, target: Tensor) -> bool:
        """Compares with a local sum: each rank knows the seeds and can generate the inputs of all ranks."""
        everyone = []
        for rank in range(self._group.size):
            generator = torch.Generator(self._device).manual_seed(1000 + rank)
            everyone.append(torch.randn(shape, generator=generator, device=self._device).to(self._dtype))
        found = call(everyone[self._group.rank], target).float()
        right = sum((x.float() for x in everyone[1:]), everyone[0].float())
        bound = TOLERANCE[self._dtype]
        is_mine = torch.allclose(found, right, atol=bound, rtol=bound)
        return bool(self._group.agree(int(is_mine)))

    def _captured(self, run: Callable[[], object]) -> Callable[[], object]:
        lane = lane_for(self._device)
        with lane.session():
            run()
            lane.begin()
            for _ in range(NUM_SUMS):
                run()
            piece = lane.end()
        assert piece is not None, "a sum is an operation"
        return piece

    def _microseconds(self, call: Callable[[], object]) -> float:
        """The median time until the device is done, over runs that all ranks start together."""
        times: list[float] = []
        for _ in range(NUM_WARM_UPS + self._settings.rounds):
            wait(self._device)
            self._group.barrier()
            started = perf_counter()
            call()
            wait(self._device)
            times.append(perf_counter() - started)
        return median(times[NUM_WARM_UPS:]) * 1e6


if __name__ == "__main__":
    main(sys.argv[1:])

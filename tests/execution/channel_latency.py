"""Measures how long orders take from rank 0 to the others, and acknowledgements back:
`python -m tests.execution.channel_latency [RANKS]`. Messages are sent one at a time, without a pause and after 5 ms."""

import sys
import time
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from saccade.execution.rank_messages import OrderOutcome, RankExecutor, RankStart
from saccade.execution.rank_processes import RankPlan, RankProcesses

PAUSES_S = (0.0, 0.005)
NUM_MESSAGES = 300


@dataclass(frozen=True)
class Timed:
    arrays: tuple[npt.NDArray[Any], ...]


def make(start: RankStart) -> RankExecutor:
    return RankExecutor(order_types=(Timed,), execute=lambda order: None)


def main(num_ranks: int) -> None:
    plan = RankPlan(num_ranks=num_ranks, factory="tests.execution.channel_latency:make", order_types=(Timed,))
    sizes: dict[str, tuple[npt.NDArray[Any], ...]] = {
        "decode of 64 requests": tuple(np.zeros((64, 5), np.int32) for _ in range(16)),
        "prefill of 8192 rows": tuple(np.zeros(8192, np.int64) for _ in range(16)),
        "pixels": (np.zeros(64 * 10**6, np.uint8),),
    }
    with closing(RankProcesses(plan, lambda error: print(error))) as ranks:
        ranks.wait_ready()
        print(f"{num_ranks} ranks; microseconds, median (95th percentile)")
        for name, arrays in sizes.items():
            num_bytes = sum(array.nbytes for array in arrays)
            for pause_s in PAUSES_S:
                num_messages = NUM_MESSAGES if num_bytes < 10**7 else 10
                rows = [one(ranks, arrays, pause_s) for _ in range(num_messages)]
                send, back = (f"{np.median(t):8.0f} ({np.percentile(t, 95):.0f})" for t in zip(*rows, strict=True))
                print(f"{name}, {num_bytes} bytes, pause {pause_s}: send {send}, all {back}")


def one(ranks: RankProcesses, arrays: tuple[npt.NDArray[Any], ...], pause_s: float) -> tuple[float, float]:
    """Microseconds until the call returned, and until all acknowledgements were read."""
    time.sleep(pause_s)
    start = time.monotonic()
    number = ranks.send(Timed(arrays))
    sent = time.monotonic()
    ranks.record(number, OrderOutcome())
    ranks.wait(number, 60.0)
    end = time.monotonic()
    return (sent - start) * 1e6, (end - start) * 1e6


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)

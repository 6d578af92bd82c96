"""Loads of docs/log.md in virtual time: the real scheduler and pace on a device that takes an H200's times.

`python -m tests.scheduling.paced_loads` prints requests/s, time to the first token and between tokens, without a limit
on steps, with fixed ones, and with the one that is found for each step.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, pairwise
from math import inf

import numpy as np

from saccade.cache.blocks import BlockPool
from saccade.cache.encoder import EncoderIndex
from saccade.cache.prefix import Span
from saccade.choice.costs import Curve
from saccade.scheduling.buckets import decode_buckets, prefill_buckets, vision_buckets
from saccade.scheduling.pace import Pace
from saccade.scheduling.request import Request
from saccade.scheduling.scheduler import Scheduler
from saccade.scheduling.step_plan import StepPlan
from saccade.wire.engine_settings import SchedulerSettings
from saccade.wire.sampling_params import SamplingParams

LIMITS = SchedulerSettings().resolved(is_cuda=True, max_position=262_144)
BUCKETS = [
    (bucket["tokens"], bucket["requests"])
    for bucket in prefill_buckets(LIMITS.max_num_batched_tokens, LIMITS.max_num_seqs + 1)
]
DECODE_ROWS, VISION_ROWS = decode_buckets(LIMITS.max_num_seqs), vision_buckets(LIMITS.encoder_budget_tokens)
HEAD_TOKENS = 4  # of the template, before an image
HOST_MS = 0.3  # from the end of a step to the next plan
LIMITS_MS = (inf, 10, 15, 20, 30, 40, 60, 0)

# One H200, Qwen3-VL-8B, bfloat16: these give the times of docs/log.md (2026-11-16) for prefill of 64 to 8,192 rows,
# decode of 1 and 64 requests with 1,000 keys, vision of 1, 8 and 32 images of 560x560, and 28 ms for one of 1920x1080.
FLOOR_MS, FIRST_MS, ROW_MS, HEAD_MS = 4.7, 1.4, 19.7e-3, 0.42
KEY_NS, PAIR_NS = 39.0, 1.18  # attention: a key of an output, a key of a prompt's row
VISION_FIRST_MS, VISION_ROW_MS, VISION_PAIR_NS = 1.26, 7.96e-3, 0.157


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """So many requests at a time; the next one reaches the engine `reply_ms` after one has ended."""

    name: str
    concurrency: int
    text: tuple[int, int]
    outputs: int
    image_rows: int = 0
    reply_ms: tuple[float, float] = (2, 6)


LOADS = (
    Load(name="560x560, 128 out, 32", concurrency=32, text=(50, 110), outputs=128, image_rows=324, reply_ms=(8, 20)),
    Load(name="text 512, 128 out, 64", concurrency=64, text=(512, 512), outputs=128),
    Load(name="1920x1080, 32 out, 16", concurrency=16, text=(50, 110), outputs=32, image_rows=2040, reply_ms=(30, 60)),
    Load(name="text 4000, 32 out, 16", concurrency=16, text=(4000, 4000), outputs=32),
    Load(name="560x560, 1 out, 32", concurrency=32, text=(50, 110), outputs=1, image_rows=324, reply_ms=(8, 20)),
)


@dataclass(frozen=True, slots=True)
class Figures:
    requests_per_s: float
    ttft_ms: float
    tpot_ms: float
    p99_ms: float
    longest_ms: float

    def __str__(self) -> str:
        between = f"{self.tpot_ms:6.2f} ms a token, p99 {self.p99_ms:6.1f}, longest {self.longest_ms:6.1f}"
        return f"{self.requests_per_s:5.1f} requests/s, TTFT {self.ttft_ms:6.1f} ms, {between}"


def step_ms(plan: StepPlan) -> float:
    return language_ms(plan) + (vision_ms([item.num_rows for item in plan.encode]) if plan.encode else 0.0)


def language_ms(plan: StepPlan) -> float:
    rows, chunks = sum(chunk.count for chunk in plan.chunks), plan.chunks
    keys = sum(chunk.end for chunk in chunks if chunk.count == 1)
    pairs = sum(chunk.count * (chunk.start + chunk.count / 2) for chunk in chunks if chunk.count > 1)
    attention = (keys * KEY_NS + pairs * PAIR_NS) / 1e6
    if rows == len(chunks):
        return 4.13 + 0.0205 * _padded(rows, DECODE_ROWS) + attention
    return rows_ms(next(n for n, room in BUCKETS if n >= rows and room >= len(chunks) + (n > rows))) + attention


def rows_ms(rows: int) -> float:
    """Of a prefill and its head, without attention."""
    return max(FLOOR_MS + 2e-3 * rows, FIRST_MS + ROW_MS * rows) + HEAD_MS


def vision_ms(images: Sequence[int]) -> float:
    pairs = sum((4 * rows) ** 2 for rows in images)
    return VISION_FIRST_MS + VISION_ROW_MS * _padded(sum(images), VISION_ROWS) + pairs * VISION_PAIR_NS / 1e6


def new_pace(max_step_ms: float) -> Pace:
    """With times of a few buckets, as an engine measures them at its start."""
    prefill = [(rows, (rows_ms(rows) - HEAD_MS + rows**2 / 2 * PAIR_NS / 1e6) / 1e3) for rows, _ in BUCKETS[:64:9]]
    vision = [(rows, vision_ms([rows // 4] * 4) / 1e3) for rows in VISION_ROWS[::6]]
    return Pace(Curve(tuple(prefill)), Curve(tuple(vision)), max_step_ms / 1e3, BUCKETS)


def _padded(rows: int, buckets: Sequence[int]) -> int:
    return buckets[min(bisect_left(buckets, rows), len(buckets) - 1)]


class Simulation:
    """As `Engine.step` does, it plans one step ahead, then waits for the oldest."""

    def __init__(self, load: Load, max_step_ms: float, num_waves: int = 8) -> None:
        self._load, self._device_free_at = load, 0.0
        pool, encoder = BlockPool(6000, 128), EncoderIndex(16_384, 16, keeps_idle=False)
        self._scheduler = Scheduler(LIMITS, pool=pool, encoder=encoder)
        self._scheduler.pace = new_pace(max_step_ms) if max_step_ms < inf else None
        self._random, self._names = np.random.default_rng(0), count()
        self._num_left = num_waves * load.concurrency
        self._arrivals: list[tuple[float, int]] = []
        for _ in range(load.concurrency):
            self._invite(0, (0, 20))
        self._arrived: dict[str, float] = {}
        self._tokens: dict[str, list[float]] = {}

    def run(self) -> Figures:
        flights: deque[tuple[StepPlan, float]] = deque()  # with its end
        now = 0.0
        while self._arrivals or flights or not self._scheduler.is_idle:
            self._admit(now)
            plan = self._scheduler.plan(now / 1e3)
            if plan.chunks:
                self._device_free_at = max(self._device_free_at, now) + step_ms(plan)
                flights.append((plan, self._device_free_at))
            if flights and (not plan.chunks or len(flights) > 1):
                now = self._take_in(*flights.popleft()) + HOST_MS
            elif not flights:
                now = max(now, self._arrivals[0][0])
        gaps = [after - before for times in self._tokens.values() for before, after in pairwise(times)] or [0.0]
        return Figures(
            requests_per_s=len(self._tokens) / now * 1e3,
            ttft_ms=float(np.mean([times[0] - self._arrived[name] for name, times in self._tokens.items()])),
            tpot_ms=float(np.mean(gaps)),
            p99_ms=float(np.percentile(gaps, 99)),
            longest_ms=max(gaps),
        )

    def _invite(self, now: float, wait_ms: tuple[float, float]) -> None:
        if self._num_left:
            self._num_left -= 1
            heappush(self._arrivals, (now + float(self._random.uniform(*wait_ms)), next(self._names)))

    def _admit(self, now: float) -> None:
        while self._arrivals and self._arrivals[0][0] <= now:
            at, number = heappop(self._arrivals)
            request = _request(
                self._load, number, int(self._random.integers(self._load.text[0], self._load.text[1] + 1))
            )
            self._scheduler.add(request)
            self._arrived[request.id], self._tokens[request.id] = at, []

    def _take_in(self, plan: StepPlan, now: float) -> float:
        results = {chunk.request_id: (1,) for chunk in plan.chunks if chunk.wants_logits}
        for update in self._scheduler.commit(plan, results):
            self._tokens[update.request_id].append(now)
            if update.finish is not None:
                self._invite(now, self._load.reply_ms)
        return now


def _request(load: Load, number: int, num_text: int) -> Request:
    span = Span(HEAD_TOKENS, load.image_rows, number.to_bytes(16, "little"))
    return Request(
        id=str(number),
        prompt_ids=(1,) * (num_text + load.image_rows),
        params=SamplingParams(temperature=0, max_tokens=load.outputs, ignore_eos=True),
        spans=(span,) if load.image_rows else (),
    )


def main() -> None:
    for load in LOADS:
        print(load.name)
        for limit_ms in LIMITS_MS:
            name = "auto" if limit_ms == 0 else "no limit" if limit_ms == inf else f"{limit_ms:.0f} ms"
            print(f"{name:>10}: {Simulation(load, limit_ms).run()}", flush=True)


if __name__ == "__main__":
    main()

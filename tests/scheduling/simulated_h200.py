"""How many milliseconds an H200 with Qwen3-VL-8B in bfloat16 takes, and the server in front of it.

Every constant is a measurement from docs/log.md. Comparison with measured loads settled three choices: requests pass
the front end one after the other (all at once, or 16 at a time, gave first tokens up to a quarter too late), attention
in the tower takes the lower of two figures, and a busy device has one factor where the trace has 1.08 and 1.14.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

import numpy as np

from saccade.choice.costs import Curve
from saccade.scheduling import buckets
from saccade.scheduling.pace import Pace
from saccade.scheduling.packing import Bins, MediaPart, pack, padded_rows
from saccade.scheduling.step_plan import StepPlan
from saccade.wire.engine_settings import SchedulerSettings

LIMITS = SchedulerSettings(max_model_len=65_536).resolved(is_cuda=True, max_position=262_144)
PREFILL = [
    (bucket["tokens"], bucket["requests"])
    for bucket in buckets.prefill_buckets(LIMITS.max_num_batched_tokens, LIMITS.max_num_seqs + 1)
]
DECODE_ROWS = buckets.decode_buckets(LIMITS.max_num_seqs)
VISION_ROWS = buckets.vision_buckets(LIMITS.encoder_budget_tokens)
VISION = Bins(
    VISION_ROWS,
    tuple(
        1 + min(buckets.MAX_FRAMES, max(buckets.MIN_FRAMES, rows // buckets.UNITS_PER_FRAME)) for rows in VISION_ROWS
    ),
)

KEY_NS, PAIR_NS = 39.0, 1.18  # attention: per key of an output, and per key of a prompt row

# `bench offline` (2026-11-19; 8,192 rows: 2026-11-16): one prompt of so many rows. Up to 128, reading weights takes the
# time. Decode of 1, 32 and 64 requests with 1,000 keys each, head included, takes 4.21, 6.17 and 7.69 ms.
PREFILL_ROWS = (96, 128, 192, 256, 320, 416, 512, 1024, 8192)
PREFILL_MS = (5.01, 5.07, 6.07, 6.67, 8.15, 9.56, 11.32, 21.95, 202.0)
PRODUCTS_MS = [ms - rows**2 / 2 * PAIR_NS / 1e6 for rows, ms in zip(PREFILL_ROWS, PREFILL_MS, strict=True)]
FLOOR_MS, HEAD_MS = 5.07, 0.38
DECODE_MS, DECODE_ROW_MS = 4.15, 19e-3

# `bench vision`: 1, 8 and 32 images of 560x560 in 4.1, 24.1 and 92.3 ms. Attention of the tower runs at 376 TFLOP/s in
# the table of kernels and at 430 in a profile, which is 0.29 ns per pair of patches: 19 of 36 ms for a 1920x1080 image.
VISION_FIRST_MS, VISION_ROW_MS, VISION_PAIR_NS = 1.26, 7.25e-3, 0.29
TOWER_BLOCKS = 27

# The GPU is limited by power: in a trace of the first load (2026-11-17) prefills took 8.9 and vision passes 3.3 ms per
# request, where the times above give 8.2 and 2.9. Products slow down; memory-bound kernels do not.
BUSY = 1.1

# The front end (2026-11-17): its event loop takes 1.65 ms per request, so 64 simultaneous ones take 106 ms, and 40 to
# 60 us per streamed token. Threads decode and preprocess 560x560 pixels in 5.0 ms. All else of a request takes 2.4.
LOOP_REQUEST_MS, LOOP_TOKEN_MS, PIXEL_MS, REST_MS = 1.65, 0.05, 5.0 / 560**2, 2.4
CALL_MS = 0.3  # host time of a replay; measurements at start-up include it


def step_ms(plan: StepPlan) -> float:
    whole = [item.num_rows for item in plan.encode if item.num_parts == 1]
    parts_ms = [
        vision_ms([item.num_rows], BUSY) * (item.end_part - item.first_part) / item.num_parts
        for item in plan.encode
        if item.num_parts > 1
    ]
    return language_ms(plan) + (vision_ms(whole, BUSY) if whole else 0.0) + sum(parts_ms)


def language_ms(plan: StepPlan) -> float:
    rows, chunks = sum(chunk.count for chunk in plan.chunks), plan.chunks
    keys = sum(chunk.end for chunk in chunks if chunk.count == 1)
    pairs = sum(chunk.count * (chunk.start + chunk.count / 2) for chunk in chunks if chunk.count > 1)
    attention_ms = (keys * KEY_NS + pairs * PAIR_NS) / 1e6
    if rows == len(chunks):
        return DECODE_MS + DECODE_ROW_MS * DECODE_ROWS[bisect_left(DECODE_ROWS, rows)] + attention_ms
    bucket = next(n for n, room in PREFILL if n >= rows and room >= len(chunks) + (n > rows))
    return prefill_ms(bucket, BUSY) + HEAD_MS + attention_ms


def prefill_ms(rows: int, busy: float = 1.0) -> float:
    """Excludes attention. A busy device is slower at products, so only beyond the time that reading weights takes."""
    idle_ms = float(np.interp(rows, PREFILL_ROWS, PRODUCTS_MS))
    return idle_ms + (busy - 1) * max(0.0, idle_ms - FLOOR_MS)


def vision_ms(images: Sequence[int], busy: float = 1.0) -> float:
    """Time of all passes that images of these row counts are packed into. A row is four patches."""
    parts = [MediaPart(item, 0, 1, rows) for item, rows in enumerate(images)]
    passes = pack(parts, VISION, lambda rows: VISION_FIRST_MS + VISION_ROW_MS * rows)
    attention_ms = sum((4 * rows) ** 2 for rows in images) * VISION_PAIR_NS / 1e6
    return len(passes) * VISION_FIRST_MS + busy * VISION_ROW_MS * padded_rows(passes, VISION) + attention_ms


def measured_pace(max_step_ms: float) -> Pace:
    """A pace with the times of a few buckets, as an engine measures them at start-up."""
    prefill = [(rows, prefill_ms(rows) + rows**2 / 2 * PAIR_NS / 1e6) for rows, _ in PREFILL[:64:9]]
    vision = [(rows, vision_ms([rows // 4] * 4)) for rows in VISION_ROWS[::6]]
    return Pace(_curve(prefill), _curve(vision), max_step_ms / 1e3, PREFILL, num_parts=num_parts)


def num_parts(num_rows: int) -> int:
    return buckets.vision_parts(num_rows, TOWER_BLOCKS)


def _curve(points: Sequence[tuple[int, float]]) -> Curve:
    return Curve(tuple((rows, (ms + CALL_MS) / 1e3) for rows, ms in points))


@dataclass(slots=True)
class FrontEnd:
    """One event loop that handles requests one after the other. Tokens go first."""

    _sent: list[tuple[float, int, int]] = field(default_factory=list)  # when, which request, its pixels
    _ready: list[tuple[float, int]] = field(default_factory=list)
    _free_at: float = 0.0

    def send(self, at: float, number: int, num_pixels: int) -> None:
        heappush(self._sent, (at, number, num_pixels))

    def stream(self, now: float, num_tokens: int) -> None:
        self._free_at = max(self._free_at, now) + num_tokens * LOOP_TOKEN_MS

    def arrived(self, now: float) -> list[int]:
        """Requests that have reached the engine since the last call."""
        while self._sent and self._sent[0][0] <= now:
            self._take_next()
        found = []
        while self._ready and self._ready[0][0] <= now:
            found.append(heappop(self._ready)[1])
        return found

    def next_at(self) -> float:
        """When the next request reaches the engine."""
        while self._sent and (not self._ready or self._sent[0][0] < self._ready[0][0]):
            self._take_next()
        return self._ready[0][0] if self._ready else inf

    def _take_next(self) -> None:
        at, number, num_pixels = heappop(self._sent)
        self._free_at = max(self._free_at, at) + LOOP_REQUEST_MS
        heappush(self._ready, (self._free_at + num_pixels * PIXEL_MS, number))

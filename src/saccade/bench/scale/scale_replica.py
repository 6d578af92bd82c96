"""One replica of a simulation: the engine's scheduler and caches, on a device with the step times of an H200."""

from collections import Counter, deque
from dataclasses import dataclass

from saccade.bench.scale.scale_settings import ScaleSettings
from saccade.cache.blocks import BlockPool
from saccade.cache.encoder import EncoderIndex
from saccade.cache.prefix import PrefixCache
from saccade.choice.costs import Curve
from saccade.scheduling.request import Request
from saccade.scheduling.scheduler import Scheduler
from saccade.scheduling.step_plan import StepPlan
from saccade.wire.engine_settings import SchedulerSettings
from saccade.wire.update import Update

BLOCK_TOKENS, PAGE_ROWS = 128, 16  # an engine's on a GPU
MAX_POSITIONS = 262_144
TOKEN = 1
CACHE_COUNTS = ("encoder_hits", "encoder_queries", "prefix_hit_tokens", "prefix_queried_tokens")
IMAGE_ROWS = 324  # a 560x560 image


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds by number of rows. The passes of a step are added up, because they share one device."""

    vision: Curve
    prefill: Curve
    decode: Curve
    head_s: float  # last MLP and logits after a prefill; decode times include them

    def of_step(self, plan: StepPlan) -> float:
        seconds = self.vision.at(sum(item.num_rows for item in plan.encode)) if plan.encode else 0.0
        num_rows = sum(chunk.count for chunk in plan.chunks)
        if num_rows == len(plan.chunks):  # one row each, as in a decode graph
            return seconds + self.decode.at(num_rows)
        return seconds + self.prefill.at(num_rows) + self.head_s


# One H200, Qwen3-VL-8B, bfloat16, graphs on; docs/log.md has the commands. Vision: 1, 8 and 32 images of 560x560
# (`saccade bench vision`). Prefill by rows, decode by requests with 1,000 keys each (`saccade bench offline`);
# measured on 2026-11-16, except prefill of 64 rows on 2026-11-15.
H200_QWEN3_VL_8B = StepTimes(
    vision=Curve(((IMAGE_ROWS, 4.37e-3), (8 * IMAGE_ROWS, 24.0e-3), (32 * IMAGE_ROWS, 92.1e-3))),
    prefill=Curve(((64, 5.02e-3), (406, 9.52e-3), (1024, 22.18e-3), (8192, 201.5e-3))),
    decode=Curve(((1, 4.19e-3), (64, 7.95e-3))),
    head_s=0.42e-3,
)


class Replica:
    """Plans one step ahead and then waits for the oldest step, as `Engine.step` does. `next_end` is when that one ends,
    None while nothing runs. Requests that arrive meanwhile wait for the next plan."""

    def __init__(self, limits: SchedulerSettings, settings: ScaleSettings, times: StepTimes) -> None:
        pool = BlockPool(settings.kv_cache_tokens // BLOCK_TOKENS + 1, BLOCK_TOKENS)
        encoder = EncoderIndex(settings.encoder_cache_tokens, PAGE_ROWS)
        prefix = PrefixCache(pool, model=b"simulated")
        self.scheduler = Scheduler(limits, pool=pool, encoder=encoder, prefix=prefix)
        self._times = times
        self._device_free_at = 0.0
        self._flights: deque[tuple[StepPlan, float]] = deque()

    @property
    def next_end(self) -> float | None:
        return self._flights[0][1] if self._flights else None

    @property
    def cache_counts(self) -> Counter[str]:
        stats = self.scheduler.stats()
        return Counter({name: getattr(stats, name) for name in CACHE_COUNTS})

    def add(self, request: Request, now: float) -> list[Update]:
        """Raises a CapacityError if the queue is full."""
        self.scheduler.add(request)
        return [] if self._flights else self._launch(now)

    def end_step(self) -> list[Update]:
        """Commits the oldest step and launches the next."""
        plan, now = self._flights.popleft()
        results = {chunk.request_id: (TOKEN,) for chunk in plan.chunks if chunk.wants_logits}
        return [*self.scheduler.commit(plan, results), *self._launch(now)]

    def _launch(self, now: float) -> list[Update]:
        updates: list[Update] = []
        while len(self._flights) < 2:
            plan = self.scheduler.plan(now)
            updates += plan.updates
            if not plan.chunks:
                break
            self._device_free_at = max(self._device_free_at, now) + self._times.of_step(plan)
            self._flights.append((plan, self._device_free_at))
        return updates


def replica_limits(settings: ScaleSettings) -> SchedulerSettings:
    limits = SchedulerSettings(max_num_seqs=settings.max_num_seqs)
    return limits.resolved(is_cuda=True, max_position=MAX_POSITIONS)

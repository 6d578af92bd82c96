"""A line in the log for every ten seconds of work: throughput, load, caches, padding. An idle server writes nothing."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from saccade.errors import SaccadeError
from saccade.server.service import Service
from saccade.wire.engine_metrics import SchedulerStats, sum_of
from saccade.wire.messages import StatsReply

EVERY_S, POLL_S = 10.0, 1.0
ANSWER_S = 5.0
_log = logging.getLogger(__name__)


class WorkLine:
    """Counts the seconds in which the server had requests, and logs a line after every ten of them."""

    def __init__(self, service: Service, say: Callable[[str], None] = _log.info) -> None:
        self._service, self._say = service, say
        self._busy_s = 0.0
        self._told = Counter[str]()
        self._tokens = (0, 0)

    async def run(self) -> None:
        last = monotonic()
        while True:
            await asyncio.sleep(POLL_S)
            now = monotonic()
            await self.note(now - last)
            last = now

    async def note(self, seconds: float) -> None:
        """Called when `seconds` have passed since the last call."""
        metrics = self._service.metrics
        tokens = (metrics.num_prompt_tokens, metrics.num_output_tokens)
        if self._service.admission.inside or tokens != self._tokens:
            self._busy_s += seconds
        self._tokens = tokens
        if self._busy_s < EVERY_S:
            return
        try:
            async with asyncio.timeout(ANSWER_S):
                reports = await self._service.engine.reports()
        except (SaccadeError, TimeoutError):  # starting, dead, or busy with a long step: report later
            return
        stats = [report.stats for report in reports.values()]
        totals, now = _totals(*tokens, stats), sum_of([one.scheduler for one in stats])
        done = totals - self._told  # never negative: a restarted engine counts from 0 again
        self._say(line_of(done, self._busy_s, now, self._service.admission.pending))
        self._told, self._busy_s = totals, 0.0


def line_of(done: Counter[str], seconds: float, scheduler: SchedulerStats, num_pending: int) -> str:
    parts = [
        f"{done['prompt_tokens'] / seconds:,.1f} prompt and {done['output_tokens'] / seconds:,.1f} generated tokens/s",
        f"{scheduler.running} running, {scheduler.waiting + num_pending} waiting",
        f"KV cache {scheduler.kv_usage:.0%}",
    ]
    if scheduler.encoder_queries:
        parts.append(f"image cache {scheduler.encoder_usage:.0%}")
    if done["looked_up"]:
        parts.append(f"prefix hits {done['found'] / done['looked_up']:.0%}")
    if done["real_rows"]:
        parts.append(f"padding {done['padded_rows'] / (done['real_rows'] + done['padded_rows']):.0%}")
    return ", ".join(parts)


def _totals(prompt_tokens: int, output_tokens: int, stats: Sequence[StatsReply]) -> Counter[str]:
    """Summed over all engines."""
    phases: list[dict[str, Any]] = [phase for one in stats for phase in one.phases.values()]
    return Counter(
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        looked_up=sum(one.scheduler.prefix_queried_tokens for one in stats),
        found=sum(one.scheduler.prefix_hit_tokens for one in stats),
        real_rows=sum(phase["real_rows"] for phase in phases),
        padded_rows=sum(phase["padded_rows"] for phase in phases),
    )

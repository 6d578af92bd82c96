"""Simulates many replicas: the real router, schedulers and caches, on devices with measured step times.

Time is virtual. It jumps from one event, an arrival or the end of a step, to the next."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from heapq import heappop, heappush
from typing import Any

import numpy as np

from saccade.bench.scale.scale_replica import H200_QWEN3_VL_8B, Replica, replica_limits
from saccade.bench.scale.scale_settings import UNBOUNDED, ScaleSettings
from saccade.bench.scale.scale_workload import Arrival, arrivals
from saccade.errors import CapacityError
from saccade.routing import Assignment, ConsistentHashing, Policy, Router, make_policy, room_of
from saccade.wire.update import FinishReason, Update

NO_BOUND = 1e12
NEWS_EVERY = 500  # requests

OnProgress = Callable[[str, int, int], None]
NewPolicy = Callable[[int], Policy]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleLine:
    """One policy with one number of replicas. Cache hits, times and `busiest` exclude the warm-up. `throughput` is
    answers per second from the start to the last arrival. `busiest` is the largest number of requests on a replica,
    divided by the mean."""

    replicas: int
    policy: str
    finished: int
    refused: int
    failed: int
    throughput: float
    throughput_per_replica: float
    encoder_hit_rate: float
    prefix_hit_rate: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    busiest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleBench:
    lines: tuple[ScaleLine, ...]
    settings: Mapping[str, Any]
    times: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Snapshot:
    time: float
    counts: Counter[str]  # of the caches
    taken: Counter[str]


def run_scale_bench(settings: ScaleSettings, on_progress: OnProgress = lambda *_: None) -> ScaleBench:
    lines = [
        Simulation(settings, count, policy).run(on_progress)
        for count in settings.replicas
        for policy in settings.policies
    ]
    return ScaleBench(lines=tuple(lines), settings=asdict(settings), times=asdict(H200_QWEN3_VL_8B))


def new_policy(name: str, step_tokens: int) -> Policy:
    """Makes a policy as servers do, for engines with steps of `step_tokens` tokens."""
    if name == UNBOUNDED:
        return ConsistentHashing(bound=NO_BOUND)
    return make_policy(name, room_tokens=room_of(step_tokens))


@dataclass(frozen=True, slots=True)
class _Informed:
    """Adds the loads that other routers last reported to its own router's loads, as front ends on a Ray cluster do."""

    policy: Policy
    others: dict[str, int] = field(default_factory=dict)

    def order(self, key: bytes, tokens: int, loads: Mapping[str, int]) -> list[str]:
        if self.others:
            loads = {name: load + self.others[name] for name, load in loads.items()}
        return self.policy.order(key, tokens, loads)


class Simulation:
    """Every request that arrives is answered, refused by all replicas, or fails."""

    def __init__(
        self,
        settings: ScaleSettings,
        num_replicas: int,
        policy: str,
        policy_for: NewPolicy | None = None,
    ) -> None:
        """`policy_for` makes the policy of each router, instead of the named one."""
        limits = replica_limits(settings)
        self._settings, self._policy = settings, policy
        self.replicas = {f"replica-{i}": Replica(limits, settings, H200_QWEN3_VL_8B) for i in range(num_replicas)}
        make = policy_for or (lambda _: new_policy(policy, limits.max_num_batched_tokens))
        self._next_report = 0.0
        self._informed = [_Informed(make(i)) for i in range(settings.routers)]
        self.routers = [Router(informed) for informed in self._informed]
        for router in self.routers:
            for name in self.replicas:
                router.join(name)
        self.now = 0.0
        self._ends: list[tuple[float, int, str]] = []  # of steps: time, a counter that breaks ties, replica
        self._num_ends = 0
        self._inside: dict[str, tuple[Arrival, Assignment]] = {}
        self.taken: Counter[str] = Counter()  # requests by replica
        self.first_token_s: dict[str, float] = {}  # after the arrival, by request
        self.end_times: dict[str, float] = {}
        self.refused: list[str] = []
        self.failures: dict[str, float] = {}

    def run(self, on_progress: OnProgress = lambda *_: None) -> ScaleLine:
        count = len(self.replicas)
        total = count * self._settings.requests_per_replica
        num_warm_up = int(total * self._settings.warm_up)
        name = f"{count} {'replica' if count == 1 else 'replicas'}, {self._policy}"
        start = self._look()
        for at, arrival in enumerate(arrivals(self._settings, count)):
            self._run_until(arrival.time)
            if at == num_warm_up:
                start = self._look()
            if at % NEWS_EVERY == 0:
                on_progress(name, at, total)
            self._report()
            self._admit(arrival)
        end = self._look()
        self._run_until(None)
        on_progress(name, total, total)
        return self._line(num_warm_up, start, end)

    def _run_until(self, time: float | None) -> None:
        """Handles all steps that end by then, or all that run if `time` is None."""
        while self._ends and (time is None or self._ends[0][0] <= time):
            self.now, _, name = heappop(self._ends)
            self._hear(self.replicas[name].end_step())
            self._await_step(name)
        self.now = self.now if time is None else time

    def _report(self) -> None:
        """Tells every router the loads of the others."""
        period = self._settings.report_s
        if len(self.routers) > 1 and period and self.now >= self._next_report:
            self._next_report = self.now + period
            loads = [router.loads for router in self.routers]
            total = {name: sum(load[name] for load in loads) for name in self.replicas}
            for own, informed in zip(loads, self._informed, strict=True):
                informed.others.update({name: total[name] - own[name] for name in total})

    def _admit(self, arrival: Arrival) -> None:
        """A replica whose queue is full refuses, and the router asks the next one."""
        router, tried = self.routers[arrival.router], set[str]()
        while (taken := router.assign(arrival.affinity_key, arrival.tokens, avoid=tried)) is not None:
            replica = self.replicas[taken.replica]
            was_idle = replica.next_end is None
            try:
                updates = replica.add(arrival.request, self.now)
            except CapacityError:
                router.finish(taken)
                tried.add(taken.replica)
                continue
            self._inside[arrival.request.id] = arrival, taken
            self.taken[taken.replica] += 1
            self._hear(updates)
            if was_idle:
                self._await_step(taken.replica)
            return
        self.refused.append(arrival.request.id)

    def _await_step(self, name: str) -> None:
        end = self.replicas[name].next_end
        if end is not None:
            self._num_ends += 1
            heappush(self._ends, (end, self._num_ends, name))

    def _hear(self, updates: Iterable[Update]) -> None:
        for update in updates:
            arrival, taken = self._inside[update.request_id]
            if update.token_ids and update.request_id not in self.first_token_s:
                self.first_token_s[update.request_id] = self.now - arrival.time
            if update.finish is not None:
                del self._inside[update.request_id]
                self.routers[arrival.router].finish(taken)
                is_answered = update.finish.reason is FinishReason.LENGTH
                (self.end_times if is_answered else self.failures)[update.request_id] = self.now

    def _look(self) -> _Snapshot:
        counts = sum((replica.cache_counts for replica in self.replicas.values()), Counter[str]())
        return _Snapshot(self.now, counts, self.taken.copy())

    def _line(self, num_warm_up: int, start: _Snapshot, end: _Snapshot) -> ScaleLine:
        assert not self._inside, f"{len(self._inside)} requests did not end"
        waits = [wait for name, wait in self.first_token_s.items() if int(name) >= num_warm_up]
        p50, p99 = (float(1e3 * np.percentile(waits, q)) if waits else None for q in (50, 99))
        throughput = sum(time <= end.time for time in self.end_times.values()) / end.time
        counts = end.counts - start.counts
        taken = [end.taken[name] - start.taken[name] for name in self.replicas]
        return ScaleLine(
            replicas=len(self.replicas),
            policy=self._policy,
            finished=len(self.end_times),
            refused=len(self.refused),
            failed=len(self.failures),
            throughput=throughput,
            throughput_per_replica=throughput / len(self.replicas),
            encoder_hit_rate=counts["encoder_hits"] / max(counts["encoder_queries"], 1),
            prefix_hit_rate=counts["prefix_hit_tokens"] / max(counts["prefix_queried_tokens"], 1),
            ttft_p50_ms=p50,
            ttft_p99_ms=p99,
            busiest=max(taken) * len(taken) / max(sum(taken), 1),
        )

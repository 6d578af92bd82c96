"""Names and meanings of an engine's metrics, shared by the server's /metrics and `LLM.get_metrics`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from saccade.wire.histogram import Histogram
from saccade.wire.tensor_parallel import ONE_RANK, TensorParallel

PREFIX = "saccade:"
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # vLLM's buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Usages are fractions between 0 and 1. The last five fields are counters."""

    waiting: int
    waiting_tokens: int
    running: int
    kv_usage: float
    encoder_usage: float
    preemptions: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    encoder_queries: int
    encoder_hits: int


def new_step_tokens() -> Histogram:
    """A histogram of tokens per step."""
    return Histogram.of(STEP_TOKENS)


def sum_of(stats: Sequence[SchedulerStats]) -> SchedulerStats:
    """Combines the stats of several engines: counts are added, usages averaged."""
    means = ("kv_usage", "encoder_usage")
    sums = {one.name: sum(getattr(part, one.name) for part in stats) for one in fields(SchedulerStats)}
    return SchedulerStats(**(sums | {name: sums[name] / max(len(stats), 1) for name in means}))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStats:
    """Of the processes for untrusted data. `killed` counts those that ended before their job was done."""

    waiting: int = 0
    killed: int = 0


@dataclass(frozen=True, slots=True)
class Metric:
    """A counter only grows; a gauge is a current value. `plain` is the name without prefix and suffix."""

    plain: str
    kind: Literal["counter", "gauge"]
    text: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return PREFIX + self.plain + ("_total" if self.kind == "counter" else "")


def counter(plain: str, text: str, value: float, **labels: str) -> Metric:
    return Metric(plain, "counter", text, value, labels)


def gauge(plain: str, text: str, value: float, **labels: str) -> Metric:
    return Metric(plain, "gauge", text, value, labels)


def scheduler_metrics(scheduler: SchedulerStats, num_pending: int = 0) -> Iterator[Metric]:
    """Metrics that other engines also have. The `num_pending` requests not yet with the scheduler count as waiting."""
    yield gauge("num_requests_running", "requests that run", scheduler.running)
    yield gauge("num_requests_waiting", "requests that wait", scheduler.waiting + num_pending)
    yield gauge("kv_cache_usage_perc", "KV cache in use, 0 to 1", scheduler.kv_usage)
    yield counter("num_preemptions", "requests put back", scheduler.preemptions)
    yield counter("prefix_cache_queries", "prompt tokens looked up", scheduler.prefix_queried_tokens)
    yield counter("prefix_cache_hits", "prompt tokens found computed", scheduler.prefix_hit_tokens)
    yield counter("mm_cache_queries", "images looked up", scheduler.encoder_queries)
    yield counter("mm_cache_hits", "images found encoded", scheduler.encoder_hits)


def job_metrics(kind: str, jobs: JobStats) -> Iterator[Metric]:
    yield gauge(f"{kind}_jobs_waiting", f"{kind} jobs that wait for a process", jobs.waiting)
    text = f"processes for {kind} that were ended before their job: limits, clients that left, crashes"
    yield counter(f"{kind}_processes_killed", text, jobs.killed)


def own_metrics(
    scheduler: SchedulerStats, phases: Iterable[Mapping[str, Any]], ranks: TensorParallel = ONE_RANK
) -> Iterator[Metric]:
    """Metrics that only this engine has. `phases` are snapshots of the phases' runners."""
    yield gauge("encoder_cache_usage", "encoder cache in use", scheduler.encoder_usage)
    for phase in phases:
        name = str(phase["phase"])
        yield counter("graph_real_tokens", "rows that were asked for", phase["real_rows"], phase=name)
        yield counter("graph_padding_tokens", "rows that replays added", phase["padded_rows"], phase=name)
        for reason, times in phase["fallbacks"].items():
            yield counter("graph_fallback", "passes without a graph", times, phase=name, reason=reason)
        if phase["selfcheck"] is not None:
            text = "replays against eager runs at the start, as a share"
            yield gauge("graph_selfcheck_max_abs_diff", text, phase["selfcheck"], phase=name)
        for result, times in phase.get("shadow", {}).items():
            text = "replays that were run again without their graph, or why not"
            yield counter("shadow_checks", text, times, phase=name, result=result)
        graphs = phase["graphs"]
        retired = sum(bool(graph.get("out_of_service")) for graph in graphs)
        yield gauge("graphs_out_of_service", "graphs that were found wrong", retired, phase=name)
        yield gauge("graph_memory_bytes", "memory of the graphs", sum(g["bytes"] for g in graphs), phase=name)
        for graph in graphs:
            labels = {"phase": name, "budget": str(graph["key"])}
            yield counter("graph_replays", "replays", graph["replays"], **labels)
            yield gauge("graph_capture_seconds", "time to capture", graph["capture_seconds"], **labels)
    yield gauge("tensor_parallel_size", "ranks that share the model", ranks.size)
    if ranks.size > 1:
        yield gauge("all_reduce_info", "what sums over the ranks are made with", 1, backend=ranks.backend)

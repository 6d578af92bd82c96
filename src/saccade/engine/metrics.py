"""Figures of an engine in this process, under the names that the server's /metrics has for them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from saccade.engine.engine import Engine

PREFIX = "saccade:"


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure. A counter only grows; a gauge is as it is now."""

    name: str
    kind: Literal["counter", "gauge"]
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


def counter(name: str, value: float, **labels: str) -> Metric:
    return Metric(f"{PREFIX}{name}_total", "counter", value, labels)


def gauge(name: str, value: float, **labels: str) -> Metric:
    return Metric(PREFIX + name, "gauge", value, labels)


def engine_metrics(engine: Engine) -> Iterator[Metric]:
    scheduler = engine.scheduler.stats()
    yield gauge("num_requests_running", scheduler.running)
    yield gauge("num_requests_waiting", scheduler.waiting)
    yield gauge("kv_cache_usage_perc", scheduler.kv_usage)
    yield gauge("encoder_cache_usage", scheduler.encoder_usage)
    yield counter("num_preemptions", scheduler.preemptions)
    yield counter("prefix_cache_queries", scheduler.prefix_queried_tokens)
    yield counter("prefix_cache_hits", scheduler.prefix_hit_tokens)
    yield counter("mm_cache_queries", scheduler.encoder_queries)
    yield counter("mm_cache_hits", scheduler.encoder_hits)
    for runner in engine.runner.phases:
        yield from _graph_metrics(runner.snapshot())


def _graph_metrics(phase: Mapping[str, Any]) -> Iterator[Metric]:
    name = phase["phase"]
    yield counter("graph_real_tokens", phase["real_rows"], phase=name)
    yield counter("graph_padding_tokens", phase["padded_rows"], phase=name)
    for reason, times in phase["fallbacks"].items():
        yield counter("graph_fallback", times, phase=name, reason=reason)
    if phase["selfcheck"] is not None:
        yield gauge("graph_selfcheck_max_abs_diff", phase["selfcheck"], phase=name)
    yield gauge("graph_memory_bytes", sum(graph["bytes"] for graph in phase["graphs"]), phase=name)
    for graph in phase["graphs"]:
        yield counter("graph_replays", graph["replays"], phase=name, budget=graph["key"])
        yield gauge("graph_capture_seconds", graph["capture_seconds"], phase=name, budget=graph["key"])

"""Prometheus metrics: vLLM's names, so that its dashboards work, and our own for graphs. Every metric is stored once
under a plain name. A scrape adds the prefixes of the chosen style, and writes OpenMetrics or Prometheus text."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from saccade.client.served import EngineReport
from saccade.server.figures.recent_load import RecentLoad
from saccade.wire.engine_metrics import PREFIX, JobStats, counter, gauge, job_metrics, own_metrics, scheduler_metrics
from saccade.wire.engine_metrics import Metric as EngineMetric
from saccade.wire.histogram import Histogram
from saccade.wire.sampling_params import SamplingParams

TEXT_TYPE, OPENMETRICS_TYPE = "text/plain", "application/openmetrics-text"
_LABELS = ("model_name", "engine")
# vLLM's buckets plus finer ones: a token of an 8B model takes less than vLLM's smallest bucket.
_TTFT = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
    2560,
)  # fmt: skip
_GAP = (
    0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1,
    2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_SPAN = (
    0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240,
    480, 960, 1920, 7680,
)  # fmt: skip
_STAGE = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_TOKENS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))
_COUNTS = (1, 2, 5, 10, 20, 50, 100)

_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("time to the first token", _TTFT),
    "inter_token_latency_seconds": ("time between two tokens", _GAP),
    "request_time_per_output_token_seconds": ("time per output token after the first, by request", _GAP),
    "e2e_request_latency_seconds": ("time of a whole request", _SPAN),
    "request_queue_time_seconds": ("time in the engine's queue", _SPAN),
    "request_inference_time_seconds": ("time from the first step to the last token", _SPAN),
    "request_prefill_time_seconds": ("time from the first step to the first token", _SPAN),
    "request_decode_time_seconds": ("time from the first to the last token", _SPAN),
    "request_prompt_tokens": ("prompt tokens of a request", _TOKENS),
    "request_generation_tokens": ("output tokens of a request", _TOKENS),
    "request_max_num_generation_tokens": ("tokens of the longest output of a request", _TOKENS),
    "request_params_n": ("outputs per request (n)", _COUNTS),
    "request_params_max_tokens": ("max_tokens of a request", _TOKENS),
}
_SGLANG = {
    "num_requests_running": "num_running_reqs",
    "num_requests_waiting": "num_queue_reqs",
    "kv_cache_usage_perc": "token_usage",
    "request_success": "num_requests",
}
_PREFIXES = {"own": (PREFIX, "vllm:"), "vllm": ("vllm:",), "sglang": ("sglang:",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the front end knows at a scrape."""

    engines: Mapping[str, EngineReport]  # by name; empty if no engine answers
    num_pending: int
    num_refused: int
    time_to_ready_s: float | None
    is_ready: bool
    is_replicated: bool = False
    media_jobs: JobStats | None = None  # None if no media are decoded


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """What metrics and spans say about a request. Times are in seconds, and missing if the request did not get that
    far; `num_output_tokens` has an entry for each of its outputs."""

    operation: str
    model: str
    request_id: str
    params: SamplingParams
    headers: Mapping[bytes, bytes]
    finish_reasons: Sequence[str]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: Sequence[int]
    total_s: float
    first_s: float | None
    timings: Mapping[str, float]

    @property
    def inference_s(self) -> float | None:
        return self.timings["prefill"] + self.timings.get("decode", 0.0) if "prefill" in self.timings else None


class Metrics:
    """All counters of one server. Counters only grow; gauges are read at each scrape, which runs in a thread while the
    event loop counts on."""

    def __init__(self, model_name: str, style: str) -> None:
        self._labels = {"model_name": model_name, "engine": "0"}
        self._style = style
        self._histograms = {name: Histogram.of(edges) for name, (_, edges) in _HISTOGRAMS.items()}
        self._stages: dict[str, Histogram] = {}
        self._ended = Counter(dict.fromkeys(("stop", "length", "abort", "error"), 0))  # by finish reason
        self._replies: Counter[tuple[str, str]] = Counter()  # by path and status
        self.num_prompt_tokens = self.num_output_tokens = 0
        self.recent_load = RecentLoad()

    def note_http(self, path: str, status: int) -> None:
        self._replies[path, str(status)] += 1

    def note_stage(self, stage: str, seconds: float) -> None:
        if stage not in self._stages:
            self._stages[stage] = Histogram.of(_STAGE)
        self._stages[stage].note(seconds)

    def note_first(self, seconds: float) -> None:
        self._histograms["time_to_first_token_seconds"].note(seconds)
        self.recent_load.note_first(seconds)

    def note_gap(self, seconds: float) -> None:
        self._histograms["inter_token_latency_seconds"].note(seconds)

    def note_tokens(self, *, prompt: int = 0, output: int = 0) -> None:
        """Counts tokens as they arrive; otherwise rates would jump when a long request ends."""
        self.num_prompt_tokens += prompt
        self.num_output_tokens += output
        self.recent_load.note_tokens(prompt=prompt, output=output)

    def note_end(self, ended: EndedRequest) -> None:
        self._ended.update(ended.finish_reasons)
        params, timings, longest = ended.params, ended.timings, max(ended.num_output_tokens, default=0)
        observed: dict[str, float] = {
            "e2e_request_latency_seconds": ended.total_s,
            "request_prompt_tokens": ended.num_prompt_tokens,
            "request_generation_tokens": sum(ended.num_output_tokens),
            "request_max_num_generation_tokens": longest,
            "request_params_n": params.n,
        }
        if params.max_tokens is not None:
            observed["request_params_max_tokens"] = params.max_tokens
        if ended.first_s is not None and longest > 1:
            per_token_s = (ended.total_s - ended.first_s) / (longest - 1)
            observed["request_time_per_output_token_seconds"] = per_token_s
        for stage in ("queue", "prefill", "decode"):
            if stage in timings:
                observed[f"request_{stage}_time_seconds"] = timings[stage]
        if ended.inference_s is not None:
            observed["request_inference_time_seconds"] = ended.inference_s
        if "vision" in timings:
            self.note_stage("vision", timings["vision"])
        for name, value in observed.items():
            self._histograms[name].note(value)

    def scrape(self, facts: Facts, accept: str = "") -> tuple[bytes, str]:
        """All metrics and their content type. The two formats name counters differently, so the reply must be in the
        one that the client parses."""
        found = _Scrape([*self._styled(facts), *self._own(facts)])
        if prefers_openmetrics(accept):
            # Other escapings turn the colon in a name into an underscore, but only in samples.
            text = openmetrics.generate_latest(found, escaping=openmetrics.ALLOWUTF8)
            return text, f"{OPENMETRICS_TYPE}; version=1.0.0; charset=utf-8"
        return generate_latest(found), f"{TEXT_TYPE}; version=0.0.4; charset=utf-8"

    def _styled(self, facts: Facts) -> Iterator[Metric]:
        for family in self._shared(facts):
            for prefix in _PREFIXES[self._style]:
                known = _SGLANG if prefix == "sglang:" else {}
                yield _renamed(family, prefix, known.get(family.name, family.name))

    def _shared(self, facts: Facts) -> Iterator[Metric]:
        yield from self._requests()
        waiting = facts.num_pending
        figures = []
        steps = []
        info = GaugeMetricFamily("cache_config_info", "the KV cache", labels=["block_size", "num_gpu_blocks", *_LABELS])
        for name, engine in facts.engines.items():
            labels = {**self._labels, "engine": name}
            figures += [replace(one, labels=labels) for one in scheduler_metrics(engine.stats.scheduler, waiting)]
            waiting = 0  # requests that no engine has yet count once
            blocks = engine.ready.kv_cache_tokens // max(engine.ready.block_size, 1)
            info.add_metric([str(engine.ready.block_size), str(blocks), *labels.values()], 1)
            steps.append((tuple(labels.values()), engine.stats.step_tokens))
        if figures:
            yield from _families(figures)
            text = "prompt and output tokens that a step computed"
            yield from (_histogram_family("iteration_tokens_total", text, _LABELS, steps), info)

    def _requests(self) -> Iterator[Metric]:
        labels = tuple(self._labels.values())
        for name, (text, _) in _HISTOGRAMS.items():
            yield _histogram_family(name, text, _LABELS, [(labels, self._histograms[name])])
        text = "requests that ended"
        ended = [
            counter("request_success", text, num, **self._labels, finished_reason=reason)
            for reason, num in self._ended.items()
        ]
        prompt = counter("prompt_tokens", "prompt tokens", self.num_prompt_tokens, **self._labels)
        output = counter("generation_tokens", "output tokens", self.num_output_tokens, **self._labels)
        yield from _families([*ended, prompt, output])

    def _own(self, facts: Facts) -> Iterator[Metric]:
        stages = [((stage,), histogram) for stage, histogram in dict(self._stages).items()]
        replies = dict(self._replies).items()
        figures = [
            counter("http_requests", "replies", num, path=path, status=status) for (path, status), num in replies
        ]
        figures += _front_figures(facts)
        for name, engine in facts.engines.items():
            labels = {"engine": name} if facts.is_replicated else {}
            figures += [replace(one, labels={**one.labels, **labels}) for one in _own_figures(engine)]
        text = "preparation of a request"
        for family in (*_families(figures), _histogram_family("image_preprocess_seconds", text, ("stage",), stages)):
            yield _renamed(family, PREFIX, family.name)


def _histogram_family(
    name: str, text: str, labels: Sequence[str], histograms: Iterable[tuple[tuple[str, ...], Histogram]]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, histogram in histograms:
        family.add_metric(values, histogram.buckets, histogram.total)
    return family


def prefers_openmetrics(accept: str) -> bool:
    """Whether an Accept header names OpenMetrics and does not prefer plain text."""
    weights: dict[str, float] = {}
    for part in accept.split(","):
        kind, *parameters = (word.strip().lower() for word in part.split(";"))
        given = [word[2:].strip() for word in parameters if word.startswith("q=")]
        try:
            weight = float(given[0]) if given else 1.0
        except ValueError:
            weight = 0.0
        weights[kind] = max(weight, weights.get(kind, 0.0))
    wanted = weights.get(OPENMETRICS_TYPE, 0.0)
    return wanted > 0 and wanted >= weights.get(TEXT_TYPE, 0.0)


class _Scrape(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


def _front_figures(facts: Facts) -> Iterator[EngineMetric]:
    yield gauge("requests_pending", "requests being prepared", facts.num_pending)
    yield gauge("ready", "whether requests are accepted", facts.is_ready)
    yield counter("requests_refused", "requests refused because the server was full", facts.num_refused)
    if facts.time_to_ready_s is not None:
        yield gauge("time_to_ready_seconds", "seconds from start to ready", facts.time_to_ready_s)
    if facts.media_jobs is not None:
        yield from job_metrics("media", facts.media_jobs)


def _own_figures(engine: EngineReport) -> Iterator[EngineMetric]:
    stats, ready = engine.stats, engine.ready
    yield from own_metrics(stats.scheduler, stats.phases.values(), ready.ranks)
    yield from job_metrics("grammar", stats.grammar_jobs)
    if stats.gpu_bytes:
        yield gauge("gpu_memory_used_bytes", "device memory in use, by all processes", stats.gpu_bytes)
        text = "device memory that the engine's own allocator holds"
        yield gauge("gpu_memory_reserved_bytes", text, stats.gpu_reserved_bytes)
        text = "device memory in use when the server became ready"
        yield gauge("gpu_memory_ready_bytes", text, ready.gpu_bytes)


def _families(figures: Iterable[EngineMetric]) -> list[Metric]:
    """Groups metrics of one name into a family."""
    found: dict[str, Any] = {}
    for one in figures:
        kind = CounterMetricFamily if one.kind == "counter" else GaugeMetricFamily
        family = found.setdefault(one.plain, kind(one.plain, one.text, labels=list(one.labels)))
        family.add_metric(list(one.labels.values()), one.value)
    return list(found.values())


def _renamed(family: Metric, prefix: str, name: str) -> Metric:
    found = Metric(prefix + name, family.documentation, family.type)
    for sample in family.samples:
        if sample.name.endswith("_created"):
            continue
        found.samples.append(sample._replace(name=prefix + name + sample.name.removeprefix(family.name)))
    return found

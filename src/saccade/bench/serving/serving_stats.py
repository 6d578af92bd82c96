"""Figures of a serving benchmark, computed from the outcomes of its requests and named as in vLLM and SGLang."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from saccade.bench.load.client_reply import Outcome
from saccade.bench.load.workload import WorkloadPrompt
from saccade.bench.serving.serving_settings import METRICS, USUAL_PERCENTILES

Figures = dict[str, Any]
NUM_QUANTILES = 101
FRONT = ("receive", "parse", "fetch", "decode_media", "preprocess")
PREPARED = FRONT[1:]
SUMS = ("prepare", "total", "first_token")
PREPARE_REST, SERVER_REST, CLIENT_REST = "wait for a thread", "rest of the server", "client and network"
SGLANG_NAMES = {"e2el": "e2e_latency"}  # where its name differs
HIGHER, LOWER = 1, -1  # which is better
# Label, key and direction of the figures that servers are compared by.
RATES_AND_TIMES = (
    ("requests/s", "request_throughput", HIGHER),
    ("good requests/s", "request_goodput", HIGHER),
    ("vision tokens/s", "vision_token_throughput", HIGHER),
    ("input tokens/s", "input_throughput", HIGHER),
    ("output tokens/s", "output_throughput", HIGHER),
    *(
        (f"{word} {metric.upper()} ms", f"{word}_{metric}_ms", LOWER)
        for metric in METRICS
        for word in ("mean", "median", "p99")
    ),
)
MAIN = (
    ("{:.2f} requests/s", "request_throughput"),
    ("mean TTFT {:.1f} ms", "mean_ttft_ms"),
    ("{:.2f} ms a token", "mean_tpot_ms"),
    ("p99 between tokens {:.1f} ms", "p99_itl_ms"),
)


def figures_of(
    outcomes: Sequence[Outcome],
    samples: Sequence[WorkloadPrompt],
    duration_s: float,
    *,
    percentiles: Sequence[float] = (90, 99),
    limits_ms: Mapping[str, float] | None = None,
    retokenized: int | None = None,
) -> Figures:
    """Rates and times cover successful requests only. `retokenized` is the number of tokens in their texts, which is
    below the number generated if special tokens are not shown."""
    good = [outcome for outcome in outcomes if outcome.is_ok]
    figures: Figures = {
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "duration": duration_s,
        "request_throughput": len(good) / duration_s,
        "request_goodput": None,
        **token_figures(good, samples, duration_s),
        "total_output_tokens_retokenized": retokenized,
        "output_throughput_retokenized": None if retokenized is None else retokenized / duration_s,
        "max_output_tokens_per_s": peak_rate(good),
        "max_concurrent_requests": peak_concurrency(outcomes),
        "concurrency": sum(outcome.e2el_s for outcome in good) / duration_s,
    }
    if limits_ms:
        figures["request_goodput"] = sum(is_good(outcome, limits_ms) for outcome in good) / duration_s
    for metric in METRICS:
        figures |= spread(metric, values_ms(good, metric), percentiles)
    figures["errors_by_kind"] = dict(Counter(outcome.error for outcome in outcomes if outcome.error).most_common())
    return figures


def main_figures(figures: Figures) -> str:
    """The main figures in one line. Those that a run does not have, such as times between tokens, are left out."""
    parts = [form.format(figures[key]) for form, key in MAIN if figures[key]]
    return ", ".join([*parts, *([f"{figures['failed']} failed"] if figures["failed"] else [])])


def token_figures(good: Sequence[Outcome], samples: Sequence[WorkloadPrompt], duration_s: float) -> Figures:
    """Token counts come from the server, else from the text that was sent."""
    prompts = [outcome.prompt_tokens or samples[outcome.index].text_tokens or 0 for outcome in good]
    total_in, total_out = sum(prompts), sum(outcome.output_tokens for outcome in good)
    told = [outcome.image_tokens for outcome in good if outcome.image_tokens is not None]
    has_images = any(sample.sizes for sample in samples)
    vision = sum(told) if told or not has_images else None
    return {
        "total_input_tokens": total_in,
        "total_input_text_tokens": None if vision is None else total_in - vision,
        "total_input_vision_tokens": vision,
        "total_output_tokens": total_out,
        "total_cached_tokens": sum(outcome.cached_tokens or 0 for outcome in good),
        "total_images": sum(len(samples[outcome.index].sizes) for outcome in good),
        "input_throughput": total_in / duration_s,
        "output_throughput": total_out / duration_s,
        "total_token_throughput": (total_in + total_out) / duration_s,
        "vision_token_throughput": None if vision is None else vision / duration_s,
        "image_throughput": sum(len(samples[outcome.index].sizes) for outcome in good) / duration_s,
    }


def values_ms(good: Iterable[Outcome], metric: str) -> list[float]:
    """One value per request; for inter-token latency, one per gap."""
    match metric:
        case "ttft":
            return [outcome.ttft_s * 1e3 for outcome in good]
        case "tpot":
            return [tpot * 1e3 for outcome in good if (tpot := outcome.tpot_s) is not None]
        case "itl":
            return [gap * 1e3 for outcome in good for gap in outcome.itls_s]
        case _:
            return [outcome.e2el_s * 1e3 for outcome in good]


def spread(metric: str, values: Sequence[float], percentiles: Sequence[float]) -> Figures:
    """Mean, median, standard deviation, maximum and percentiles (None without values), and quantiles for plotting."""
    points = dict.fromkeys((*percentiles, *USUAL_PERCENTILES[metric]))
    found: dict[str, float | None] = dict.fromkeys(("mean", "median", "std", "max", *map(percentile_name, points)))
    quantiles: list[float] = []
    if values:
        data = np.asarray(values)
        found = {"mean": data.mean(), "median": np.median(data), "std": data.std(), "max": data.max()}
        found |= {percentile_name(point): np.percentile(data, point) for point in points}
        found = {name: float(value) for name, value in found.items() if value is not None}
        quantiles = [round(float(value), 4) for value in np.percentile(data, np.linspace(0, 100, NUM_QUANTILES))]
    figures: Figures = {f"{name}_{metric}_ms": value for name, value in found.items()}
    if metric in SGLANG_NAMES:
        figures |= {f"{name}_{SGLANG_NAMES[metric]}_ms": value for name, value in found.items()}
    return figures | {f"{metric}_quantiles_ms": quantiles}


def percentile_name(point: float) -> str:
    return f"p{point:g}"


def is_good(outcome: Outcome, limits_ms: Mapping[str, float]) -> bool:
    """Whether a request met every limit; for inter-token latency its slowest gap counts."""
    return all(max(values_ms([outcome], metric), default=0.0) <= most for metric, most in limits_ms.items())


def peak_rate(good: Iterable[Outcome]) -> int:
    """The most tokens that arrived within one second of the clock."""
    seconds: Counter[int] = Counter()
    for outcome in good:
        share = outcome.output_tokens / max(len(outcome.token_times_s), 1)
        for time in outcome.token_times_s:
            seconds[int(outcome.sent_s + time)] += share  # type: ignore[assignment]
    return round(max(seconds.values(), default=0))


def peak_concurrency(outcomes: Iterable[Outcome]) -> int:
    steps = sorted(
        step for each in outcomes for step in ((each.sent_s, 1), (each.sent_s + max(each.e2el_s, each.ttft_s), -1))
    )
    level = peak = 0
    for _, change in steps:
        level += change
        peak = max(peak, level)
    return peak


def stage_figures(good: Sequence[Outcome]) -> dict[str, Figures]:
    """Shows where the time of requests went, from the server's timings and the client's clock: each stage's mean,
    median and 99th percentile in ms, and its share of the mean end-to-end time."""
    told = [outcome for outcome in good if outcome.timings]
    if not told:
        return {}
    rows = [split_stages(outcome.timings, outcome.e2el_s) for outcome in told]
    whole_s = float(np.mean([outcome.e2el_s for outcome in told])) or 1.0
    names = list(dict.fromkeys(name for row in rows for name in row))
    last = [name for name in (SERVER_REST, CLIENT_REST) if name in names]
    columns = {
        name: [row.get(name, 0.0) for row in rows] for name in (*(name for name in names if name not in last), *last)
    }
    return {
        name: {
            "mean_ms": float(np.mean(values)) * 1e3,
            "median_ms": float(np.median(values)) * 1e3,
            "p99_ms": float(np.percentile(values, 99)) * 1e3,
            "share": float(np.mean(values)) / whole_s,
        }
        for name, values in columns.items()
    }


def split_stages(timings: Mapping[str, float], e2el_s: float) -> dict[str, float]:
    """Splits the end-to-end time into consecutive stages. `total` (all of the server's time) and `prepare` (body to
    prompt) contain other stages. Their remainders, and that of the end-to-end time, become separate stages. `vision` is
    subtracted from `prefill`, which contains it."""
    stages = {name: value for name, value in timings.items() if name not in SUMS}
    if {"vision", "prefill"} <= stages.keys():
        stages["vision"] = min(stages["vision"], stages["prefill"])
        stages["prefill"] -= stages["vision"]
    if "prepare" in timings:
        inside = sum(stages.get(name, 0.0) for name in PREPARED)
        stages = _insert_before_engine(stages, PREPARE_REST, timings["prepare"] - inside)
    if "total" in timings:
        stages[SERVER_REST] = timings["total"] - sum(stages.values())
    stages[CLIENT_REST] = e2el_s - sum(stages.values())
    return stages


def _insert_before_engine(stages: Mapping[str, float], name: str, value: float) -> dict[str, float]:
    """Puts front-end stages first, whatever the server's order."""
    front = {key: stages[key] for key in FRONT if key in stages}
    return {**front, name: value, **{key: each for key, each in stages.items() if key not in front}}

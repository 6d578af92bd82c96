"""Why two results of `saccade bench serve` cannot be compared fairly: different work, load or servers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from saccade.bench.load.metrics_text import family_and_labels
from saccade.config import flag_of

Data = Mapping[str, Any]
TARGET_FIELDS = ("backend", "endpoint", "extra_request_body", "disable_stream", "request_timings")
OUTPUT_FIELDS = ("goodput",)
ENVIRONMENT_FIELDS = ("model", "max_model_len", "server", "client", "machine", "text", "serve_model", "serve_flags")
# These are part of the server's state, not of its settings.
CHANGING = ("model_name", "time_to_ready_s", "phase", "requests", "tasks", "time", "uptime", "uptime_s")
# In the files of all benchmarks, also of those that do not save their settings.
COMMON_FIELDS = ("backend", "model_id", "num_prompts", "request_rate", "burstiness", "max_concurrency")
WORK = (("input tokens", "total_input_tokens"), ("vision tokens", "total_input_vision_tokens"),
        ("output tokens", "total_output_tokens"), ("images", "total_images"))  # fmt: skip
SAME_WORK, ALIKE = 0.02, 0.1  # for the same content, and for newly drawn lengths


def differences(earlier: Data, now: Data) -> list[str]:
    """Returns a line for each difference that makes the comparison unfair."""
    return [
        *_settings_lines(earlier, now),
        *_content_lines(earlier, now),
        *_environment_lines(earlier, now),
        *unequal_work(("earlier", "now"), (earlier, now), SAME_WORK if _content(earlier) == _content(now) else ALIKE),
        *_state_lines("the earlier run", earlier),
    ]


def unequal_work(names: Sequence[str], runs: Sequence[Data], tolerance: float = SAME_WORK) -> list[str]:
    """Compares tokens and images per answered request; `tolerance` is the largest relative difference allowed."""
    lines = []
    for label, key in WORK:
        means = [_mean(run, key) for run in runs]
        known = [mean for mean in means if mean is not None]
        if len(known) > 1 and max(known) - min(known) > tolerance * max(known):
            told = ", ".join(f"{name} {mean:.1f}" for name, mean in zip(names, means, strict=True) if mean is not None)
            lines.append(f"NOT THE SAME WORK: {label} a request: {told}")
    return lines


def _settings_lines(earlier: Data, now: Data) -> Iterator[str]:
    old, new = (run.get("settings") for run in (earlier, now))
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        yield "NOT FULLY COMPARABLE: the earlier result lacks its settings (content, seed, server)"
        yield from _unequal(earlier, now, COMMON_FIELDS)
        return
    for part, names in (("target", TARGET_FIELDS), ("workload", ()), ("load", ()), ("output", OUTPUT_FIELDS)):
        before, after = old.get(part, {}), new.get(part, {})
        shared = [name for name in after if name in before and name != "seed"]
        yield from _unequal(before, after, names or shared, flag=True)


def _content_lines(earlier: Data, now: Data) -> Iterator[str]:
    """Compares seeds, which explain why content differs, and if they are equal or unknown, digests of the content."""
    seeds = [run.get("settings", {}).get("workload", {}).get("seed") for run in (earlier, now)]
    contents = [_content(run) for run in (earlier, now)]
    if None not in seeds and seeds[0] != seeds[1]:
        yield f"OTHER CONTENT: seed was {seeds[0]}, is {seeds[1]}; --seed {seeds[0]} repeats it (with --flush-cache)"
    elif None not in contents and contents[0] != contents[1]:
        yield f"OTHER CONTENT: digest of the prompts was {contents[0]}, is {contents[1]}"


def _content(run: Data) -> Any:
    """The digest of the prompts, if the result has one."""
    return (run.get("environment") or {}).get("content")


def _environment_lines(earlier: Data, now: Data) -> Iterator[str]:
    old, new = (run.get("environment") or {} for run in (earlier, now))
    if not old or not new:  # a file of another benchmark
        return
    yield from _unequal(old, new, ENVIRONMENT_FIELDS)
    told = [_flat(each.get("server_info") or {}) | _labels(run) for each, run in ((old, earlier), (new, now))]
    if told[0] and told[1]:
        yield from _unequal(told[0], told[1], sorted(told[0].keys() | told[1].keys()), title="server ")


def _state_lines(name: str, run: Data) -> Iterator[str]:
    for line in run.get("warnings") or ():
        yield f"{name}: {line}"
    if failed := run.get("failed"):
        yield f"{name}: {failed} requests failed, and figures are over the others"


def _unequal(old: Data, new: Data, names: Sequence[str], *, title: str = "", flag: bool = False) -> Iterator[str]:
    for name in names:
        before, after = old.get(name), new.get(name)
        if str(before) != str(after) and not (_is_unset(before) and _is_unset(after)):
            shown = flag_of(name) if flag else f"{title}{name}"
            yield f"UNEQUAL: {shown} was {_shown(before)}, is {_shown(after)}"


def _labels(run: Data) -> dict[str, str]:
    """Settings that a server reports as labels of metrics such as vllm:cache_config_info."""
    found: dict[str, str] = {}
    for name in run.get("server_gauges") or {}:
        family, labels = family_and_labels(str(name))
        if family.endswith("_info"):
            short = family.rpartition(":")[2].removesuffix("_info")
            found |= {f"{short}.{label}": value for label, value in labels.items() if label not in CHANGING}
    return found


def _flat(values: Data, above: str = "") -> dict[str, Any]:
    """Flattens nested settings into dotted names, without values that change while a server runs."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name in CHANGING:
            continue
        if isinstance(value, Mapping):
            found |= _flat(value, f"{above}{name}.")
        else:
            found[f"{above}{name}"] = value
    return found


def _mean(run: Data, key: str) -> float | None:
    total, count = run.get(key), run.get("completed")
    return float(total) / count if isinstance(total, int | float) and count else None


def _is_unset(value: Any) -> bool:
    return value is None or value == ""


def _shown(value: Any) -> str:
    return "not told" if _is_unset(value) else str(value)

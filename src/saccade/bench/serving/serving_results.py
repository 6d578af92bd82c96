"""Saves results as JSON with the keys that vLLM's and SGLang's tools read, and compares runs with the first."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from saccade.bench.serving.serving_run import ServingRun
from saccade.bench.serving.serving_settings import OutputSettings
from saccade.bench.serving.serving_stats import HIGHER, LOWER, RATES_AND_TIMES
from saccade.errors import ConfigError
from saccade.terminal import write_json

COMPARED = (*RATES_AND_TIMES, ("failed", "failed", LOWER), ("duration s", "duration", LOWER))
SAME = 0.02  # a smaller change is noise
# vLLM writes what its user says about a run (--metadata) beside the figures, under any name.
_OWN_KINDS = {"settings": dict, "environment": dict, "server_gauges": dict, "warnings": list}

COLOURS = {"better": "green", "worse": "red", "": "default"}
Named = Sequence[tuple[str, Mapping[str, Any]]]
"""The data of runs, each with its name."""


def as_data(run: ServingRun, *, is_detailed: bool = False) -> dict[str, Any]:
    settings = run.settings
    data: dict[str, Any] = {
        "date": run.environment["date"],
        "label": run.name,
        "backend": settings["target"]["backend"],
        "endpoint_type": settings["target"]["backend"],
        "model_id": run.environment["model"],
        "num_prompts": len(run.outcomes),
        "request_rate": settings["load"]["request_rate"],
        "burstiness": settings["load"]["burstiness"],
        "max_concurrency": settings["load"]["max_concurrency"],
        **run.figures,
        "stages": run.stages,
        "graphs": run.graphs,
        "server_metrics": run.metrics,
        "server_gauges": run.gauges,
        "caches": run.caches.as_data(),
        "warnings": run.warnings,
        "environment": run.environment,
        "settings": settings,
    }
    return data | _details(run) if is_detailed else data


def save(run: ServingRun, output: OutputSettings, *, is_one_of_many: bool = False) -> Path:
    """Writes a run to the file of the settings; if there are several runs, file names include the run's name."""
    backend, rate = run.settings["target"]["backend"], run.settings["load"]["request_rate"]
    path = result_path(output, [backend, f"{rate}qps", run.name], run.environment["date"])
    if is_one_of_many and output.result_filename:
        path = path.with_name(f"{path.stem}-{_safe(run.name)}{path.suffix or '.json'}")
    write_result(path, as_data(run, is_detailed=output.save_detailed))
    return path


def result_path(output: OutputSettings, words: Iterable[str], date: str) -> Path:
    """The file that the user named, or one named by words and date."""
    moment = datetime.fromisoformat(date).strftime("%Y%m%d-%H%M%S")
    name = "-".join(_safe(word) for word in (*words, moment) if word)
    return Path(output.result_dir) / (output.result_filename or f"{name}.json")


def write_result(path: Path, data: Mapping[str, Any]) -> None:
    write_json(path, data, "--result-dir, --result-filename", makes_folder=True)


def _safe(word: str) -> str:
    return "".join(char if char.isalnum() or char in "-_." else "_" for char in word)


def load(path: str) -> dict[str, Any]:
    """Reads an earlier result of Saccade, vLLM, or SGLang (the last line of its file)."""
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
        try:
            data = json.loads(text)
        except ValueError:
            data = json.loads(text.splitlines()[-1])
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(f"{path} is not a benchmark result: {error} (--compare)") from None
    if not isinstance(data, dict) or "request_throughput" not in data:
        raise ConfigError(f"{path} is not a result of a serving benchmark: it has no request_throughput (--compare)")
    return _with_our_names(data)


def _with_our_names(data: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang has e2e_latency for e2el and total_throughput for total_token_throughput. Leaves out what has only a
    name of ours."""
    renamed = {key.replace("_e2e_latency_ms", "_e2el_ms"): value for key, value in data.items()}
    if "total_throughput" in data:
        renamed.setdefault("total_token_throughput", data["total_throughput"])
    found = {**renamed, **data}
    return {key: value for key, value in found.items() if isinstance(value, _OWN_KINDS.get(key, object))}


def _details(run: ServingRun) -> dict[str, Any]:
    outcomes = run.outcomes
    return {
        "input_lens": [outcome.prompt_tokens for outcome in outcomes],
        "image_lens": [outcome.image_tokens for outcome in outcomes],
        "output_lens": [outcome.output_tokens for outcome in outcomes],
        "ttfts": [outcome.ttft_s for outcome in outcomes],
        "itls": [outcome.itls_s for outcome in outcomes],
        "e2els": [outcome.e2el_s for outcome in outcomes],
        "start_times": [outcome.sent_s for outcome in outcomes],
        "image_sizes": [sample.sizes for sample in run.samples],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [f"{outcome.error}: {outcome.message}" if outcome.error else "" for outcome in outcomes],
        "timings": [outcome.timings for outcome in outcomes],
    }


def comparison_table(named: Named) -> Table:
    """Every figure that at least one run has, and each run's gain over the first; above 1 is always better."""
    first, *others = (escape(name) for name, _ in named)
    headers = ("", first, *(part for name in others for part in (name, "gain")))
    table = Table(*headers, title=f"compared with {first}: a gain above 1 is better")
    for label, key, direction in COMPARED:
        base, *values = (_number(run.get(key)) for _, run in named)
        if any((base, *values)):
            cells = [part for value in values for part in (_shown(value), _gain(base, value, direction))]
            table.add_row(label, _shown(base), *cells)
    return table


def _gain(base: float | None, value: float | None, direction: int) -> str:
    if not base or not value:
        return ""
    gain = value / base if direction == HIGHER else base / value
    verdict = "" if abs(gain - 1) < SAME else "better" if gain > 1 else "worse"
    return f"[{COLOURS[verdict]}]{gain:.2f}x[/]"


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"

"""Saves results as JSON with the keys that vLLM's and SGLang's tools read, and compares runs with the first."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from saccade.bench.serving.serving_run import ServingRun
from saccade.bench.serving.serving_settings import OutputSettings
from saccade.errors import ConfigError
from saccade.terminal import write_json

RESULT_FLAGS = "--result-dir, --result-filename"
HIGHER, LOWER = 1, -1
COMPARED = (
    ("requests/s", "request_throughput", HIGHER),
    ("good requests/s", "request_goodput", HIGHER),
    ("vision tokens/s", "vision_token_throughput", HIGHER),
    ("input tokens/s", "input_throughput", HIGHER),
    ("output tokens/s", "output_throughput", HIGHER),
    *(
        (f"{word} {metric.upper()} ms", f"{word}_{metric}_ms", LOWER)
        for metric in ("ttft", "tpot", "itl", "e2el")
        for word in ("mean", "median", "p99")
    ),
    ("failed", "failed", LOWER),
    ("duration s", "duration", LOWER),
)
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
    path = Path(output.result_dir) / (output.result_filename or _file_name(run))
    if is_one_of_many and output.result_filename:
        path = path.with_name(f"{path.stem}-{safe_name(run.name)}{path.suffix or '.json'}")
    write_json(path, as_data(run, is_detailed=output.save_detailed), RESULT_FLAGS, makes_folder=True)
    return path


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


def _file_name(run: ServingRun) -> str:
    rate, backend = run.settings["load"]["request_rate"], run.settings["target"]["backend"]
    moment = datetime.fromisoformat(run.environment["date"]).strftime("%Y%m%d-%H%M%S")
    parts = (backend, f"{rate}qps", safe_name(run.name), moment)
    return "-".join(part for part in parts if part) + ".json"


def safe_name(name: str) -> str:
    return "".join(char if char.isalnum() or char in "-_." else "_" for char in name)


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of all runs, and each run's gain over the first; above 1 is always better."""

    label: str
    values: tuple[float | None, ...]
    gains: tuple[float | None, ...]

    def verdict(self, index: int) -> str:
        gain = self.gains[index]
        if index == 0 or gain is None or abs(gain - 1) < SAME:
            return ""
        return "better" if gain > 1 else "worse"


def comparison_table(named: Named) -> Table:
    first, *others = (escape(name) for name, _ in named)
    headers = ("", first, *(part for name in others for part in (name, "gain")))
    table = Table(*headers, title=f"compared with {first}: a gain above 1 is better")
    for row in compare([data for _, data in named]):
        cells = [_shown(row.values[0])]
        for index in range(1, len(row.values)):
            gain = row.gains[index]
            cells.append(_shown(row.values[index]))
            cells.append("" if gain is None else f"[{COLOURS[row.verdict(index)]}]{gain:.2f}x[/]")
        table.add_row(row.label, *cells)
    return table


def compare(runs: Sequence[Mapping[str, Any]]) -> list[Compared]:
    """Compares every figure that at least one run has."""
    rows = []
    for label, key, direction in COMPARED:
        values = tuple(_number(run.get(key)) for run in runs)
        if any(values):
            rows.append(Compared(label, values, tuple(_gain(values[0], value, direction) for value in values)))
    return rows


def _gain(base: float | None, value: float | None, direction: int) -> float | None:
    if not base or not value:
        return None
    return value / base if direction == HIGHER else base / value


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"

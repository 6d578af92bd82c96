"""Results as JSON files, with the keys that vLLM's and SGLang's tools read."""

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from saccade.bench.serving import ServingRun
from saccade.bench.serving_settings import OutputSettings
from saccade.errors import ConfigError


def as_data(run: ServingRun, *, is_detailed: bool = False) -> dict[str, Any]:
    """One run as plain data."""
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
        "environment": run.environment,
        "settings": settings,
    }
    return data | _details(run) if is_detailed else data


def save(run: ServingRun, output: OutputSettings, *, is_one_of_many: bool = False) -> Path:
    """Write a run where the settings say; one of many has its name in the file's."""
    path = Path(output.result_dir) / (output.result_filename or _file_name(run))
    if is_one_of_many and output.result_filename:
        path = path.with_name(f"{path.stem}-{_safe(run.name)}{path.suffix or '.json'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(as_data(run, is_detailed=output.save_detailed), indent=1), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror} (--result-dir, --result-filename)") from None
    return path


def load(path: str) -> dict[str, Any]:
    """An earlier result: this benchmark's, vLLM's, or the last line of a file of SGLang's."""
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
        try:
            data = json.loads(text)
        except ValueError:
            data = json.loads(text.splitlines()[-1])
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(f"{path} is no result of a benchmark: {error} (--compare)") from None
    if not isinstance(data, dict) or "request_throughput" not in data:
        raise ConfigError(f"{path} is no result of a serving benchmark: it has no request_throughput (--compare)")
    return _with_our_names(data)


def _with_our_names(data: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang says e2e_latency for e2el and total_throughput for total_token_throughput."""
    renamed = {key.replace("_e2e_latency_ms", "_e2el_ms"): value for key, value in data.items()}
    if "total_throughput" in data:
        renamed.setdefault("total_token_throughput", data["total_throughput"])
    return {**renamed, **data}


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
    parts = (backend, f"{rate}qps", _safe(run.name), moment)
    return "-".join(part for part in parts if part) + ".json"


def _safe(name: str) -> str:
    return "".join(char if char.isalnum() or char in "-_." else "_" for char in name)

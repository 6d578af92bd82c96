"""`saccade bench serve --loads`: runs several loads on one server, on several in turn, or on its own servers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from saccade.bench.load.startup_server import LaunchedServer
from saccade.bench.serving.serving_against import Comparison, round_seed, run_against
from saccade.bench.serving.serving_against_report import comparison_data
from saccade.bench.serving.serving_against_settings import AgainstSettings
from saccade.bench.serving.serving_interval import Ratio
from saccade.bench.serving.serving_results import COLOURS, as_data
from saccade.bench.serving.serving_run import ServingRun, Shown, run_serving
from saccade.bench.serving.serving_settings import OutputSettings, ServingPlan, VariantSettings
from saccade.errors import ConfigError

COLUMNS = (
    ("requests/s", "request_throughput", 2),
    ("mean TTFT ms", "mean_ttft_ms", 1),
    ("p99 TTFT ms", "p99_ttft_ms", 1),
    ("ms a token", "mean_tpot_ms", 2),
    ("p99 between tokens, ms", "p99_itl_ms", 1),
)
RATES = ("request_throughput", "mean_ttft_ms")
"""Figures whose ratios are shown."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The runs of one load, one for each server, in order. Only servers that took turns are compared."""

    name: str
    runs: list[ServingRun]
    comparison: Comparison | None = None

    @property
    def warnings(self) -> list[str]:
        found = [line for run in self.runs for line in run.warnings]
        found += self.comparison.warnings if self.comparison is not None else []
        return [f"{self.name}: {line}" for line in dict.fromkeys(found)]

    def ratios(self, run: ServingRun) -> dict[str, Ratio]:
        """Compares the first server with that of `run`, by figure."""
        found = self.comparison.ratios.get(run.name, []) if self.comparison is not None else []
        return {ratio.key: ratio for ratio in found}


def run_loads(
    plans: Mapping[str, ServingPlan], variants: VariantSettings, against: AgainstSettings, shown: Shown
) -> list[LoadResult]:
    """Runs all loads, each with its own content, so that no load hits what another left in a cache."""
    seeded = {
        name: replace(plan, workload=replace(plan.workload, seed=round_seed(plan.workload.seed, number)))
        for number, (name, plan) in enumerate(plans.items())
    }
    if against.against:
        return [_compared(name, plan, against, shown) for name, plan in seeded.items()]
    if not variants.is_used:
        return [LoadResult(name, [_run(name, plan, shown)]) for name, plan in seeded.items()]
    runs: dict[str, list[ServingRun]] = {name: [] for name in seeded}
    for variant, flags in variants.flags_by_name().items():
        shown.say(f"starting {variant or 'a server'} {flags}".rstrip())
        with LaunchedServer(variants.serve_model, flags, timeout_s=variants.start_timeout_s, say=shown.say) as server:
            for name, plan in seeded.items():
                own = replace(plan, target=replace(plan.target, base_url=server.url))
                made = _run(name, own, shown, variant)
                made.environment.update(
                    serve_model=variants.serve_model, serve_flags=flags, time_to_ready_s=server.ready_s
                )
                runs[name].append(made)
    return [LoadResult(name, own) for name, own in runs.items()]


def _run(name: str, plan: ServingPlan, shown: Shown, server: str = "") -> ServingRun:
    shown.say(f"load: {name}")
    return run_serving(plan, shown, name=server)


def _compared(name: str, plan: ServingPlan, against: AgainstSettings, shown: Shown) -> LoadResult:
    shown.say(f"load: {name}")
    comparison = run_against(plan, against, shown)
    return LoadResult(name, comparison.runs, comparison)


def loads_table(results: Sequence[LoadResult]) -> Table:
    """A row for each load and server. If a ratio is above 1, the first server is ahead of that of the row."""
    has_servers = any(len(result.runs) > 1 for result in results)
    has_ratios = any(result.comparison is not None for result in results)
    heads = ["load", *(["server"] if has_servers else []), *(label for label, _, _ in COLUMNS), "failed"]
    if has_ratios:
        heads += ["ratio of requests/s (95 %)", "ratio of TTFT (95 %)"]
    table = Table(*heads)
    for result in results:
        for index, run in enumerate(result.runs):
            cells = ["" if index else escape(result.name), *([escape(run.name)] if has_servers else [])]
            cells += [_figure(run.figures.get(key), digits) for _, key, digits in COLUMNS]
            cells.append(f"[red]{run.failed}[/]" if run.failed else "0")
            if has_ratios:
                ratios = result.ratios(run)
                cells += [_ratio(ratios.get(key)) for key in RATES]
            table.add_row(*cells)
    return table


def save_loads(results: Sequence[LoadResult], output: OutputSettings) -> Path:
    """Writes all loads to one file."""
    moment = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    path = Path(output.result_dir) / (output.result_filename or f"loads-{moment}.json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"loads": [_data(each, output) for each in results]}, indent=1), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror} (--result-dir, --result-filename)") from None
    return path


def _data(result: LoadResult, output: OutputSettings) -> dict[str, Any]:
    if result.comparison is not None:
        return {"name": result.name, **comparison_data(result.comparison, is_detailed=output.save_detailed)}
    return {"name": result.name, "targets": [as_data(run, is_detailed=output.save_detailed) for run in result.runs]}


def _figure(value: Any, digits: int) -> str:
    return f"{value:.{digits}f}" if isinstance(value, int | float) and value else ""


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    return f"[{COLOURS[ratio.verdict]}]{ratio.ratio:.2f}[/] ({ratio.low:.2f} to {ratio.high:.2f})"

"""`saccade bench serve --loads`: runs several loads on one server, on several in turn, or on its own servers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from saccade.bench.serving.serving_against import Comparison, round_seed, run_against
from saccade.bench.serving.serving_against_report import comparison_data
from saccade.bench.serving.serving_against_settings import AgainstSettings
from saccade.bench.serving.serving_interval import Ratio
from saccade.bench.serving.serving_results import COLOURS, RESULT_FLAGS, as_data
from saccade.bench.serving.serving_run import ServingRun, Shown, run_serving, started
from saccade.bench.serving.serving_settings import OutputSettings, ServingPlan, VariantSettings
from saccade.bench.serving.serving_stats import main_figures
from saccade.terminal import write_json

COLUMNS = (
    ("requests/s", "request_throughput", 2),
    ("mean TTFT ms", "mean_ttft_ms", 1),
    ("p99 TTFT ms", "p99_ttft_ms", 1),
    ("ms a token", "mean_tpot_ms", 2),
    ("p99 between tokens, ms", "p99_itl_ms", 1),
)
RATES = ("request_throughput", "mean_ttft_ms")
"""Figures whose ratios are shown."""


@dataclass(slots=True)
class LoadResult:
    """The runs of one load so far, one for each server, in order. `left` names the servers that have yet to finish it.
    Only servers that took turns are compared."""

    name: str
    plan: ServingPlan
    left: list[str]
    runs: list[ServingRun] = field(default_factory=list)
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


def new_results(plans: Mapping[str, ServingPlan], variants: VariantSettings) -> list[LoadResult]:
    """A result to fill for each load. Each has its own content, so that no load hits what another left in a cache."""
    servers = variants.flags_by_name() if variants.is_used else [""]
    seeds = [round_seed(plan.workload.seed, number) for number, plan in enumerate(plans.values())]
    return [
        LoadResult(name, replace(plan, workload=replace(plan.workload, seed=seed)), list(servers))
        for (name, plan), seed in zip(plans.items(), seeds, strict=True)
    ]


def run_loads(
    results: Sequence[LoadResult],
    variants: VariantSettings,
    against: AgainstSettings,
    shown: Shown,
    save: Callable[[], None],
) -> None:
    """Runs all loads and fills their results. `save` is called whenever a server has finished a load."""
    if not variants.is_used:
        for result in results:
            if against.against:
                _compare(result, against, shown)
            else:
                _run(result, partial(run_serving, shown=shown), shown)
            save()
        return
    for name in variants.flags_by_name():
        with started(variants, name, shown) as measure:
            for result in results:
                _run(result, measure, shown, name)
                save()


def unfinished(results: Sequence[LoadResult]) -> list[str]:
    """The names of unfinished loads, each with the server if that has a name."""
    return [f"{one.name} ({server})" if server else one.name for one in results for server in one.left]


def _run(result: LoadResult, measure: Callable[[ServingPlan], ServingRun], shown: Shown, server: str = "") -> None:
    shown.say(f"load: {result.name}")
    result.runs.append(measure(result.plan))
    result.left.remove(server)
    _tell(result, result.runs[-1], shown)


def _compare(result: LoadResult, against: AgainstSettings, shown: Shown) -> None:
    def keep(comparison: Comparison) -> None:
        result.comparison, result.runs = comparison, comparison.runs

    shown.say(f"load: {result.name}")
    run_against(result.plan, against, shown, keep)
    result.left.clear()
    for run in result.runs:
        _tell(result, run, shown)


def _tell(result: LoadResult, run: ServingRun, shown: Shown) -> None:
    name = f"{result.name}: {run.name}" if run.name else result.name
    shown.tell(f"{name}: {main_figures(run.figures)}")
    found = result.ratios(run)
    told = [f"{found[key].label} {found[key].ratio:.2f} {_interval(found[key])}" for key in RATES if key in found]
    if told:
        shown.tell(f"{name}: ratios, above 1 if {result.runs[0].name} is ahead: {', '.join(told)}")


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


def loads_path(output: OutputSettings) -> Path:
    moment = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return Path(output.result_dir) / (output.result_filename or f"loads-{moment}.json")


def save_loads(results: Sequence[LoadResult], output: OutputSettings, path: Path) -> None:
    """Writes all loads that have figures to one file."""
    left = unfinished(results)
    loads = [_data(each, output) for each in results if each.runs]
    data = {"is_complete": not left, "unfinished": left, "loads": loads}
    write_json(path, data, RESULT_FLAGS, makes_folder=True)


def _data(result: LoadResult, output: OutputSettings) -> dict[str, Any]:
    if result.comparison is not None:
        return {"name": result.name, **comparison_data(result.comparison, is_detailed=output.save_detailed)}
    return {"name": result.name, "targets": [as_data(run, is_detailed=output.save_detailed) for run in result.runs]}


def _figure(value: Any, digits: int) -> str:
    return f"{value:.{digits}f}" if isinstance(value, int | float) and value else ""


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    return f"[{COLOURS[ratio.verdict]}]{ratio.ratio:.2f}[/] {_interval(ratio)}"


def _interval(ratio: Ratio) -> str:
    return f"({ratio.low:.2f} to {ratio.high:.2f})"

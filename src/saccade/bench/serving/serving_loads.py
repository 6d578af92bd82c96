"""Runs the loads of `saccade bench serve` on one server, on several in turn, or on servers that it starts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.markup import escape
from rich.table import Table

from saccade.bench.serving.serving_comparison import Comparison, Ratio, comparison_data
from saccade.bench.serving.serving_results import COLOURS, as_data
from saccade.bench.serving.serving_run import ServingRun, Shown
from saccade.bench.serving.serving_settings import AgainstSettings, ServingPlan, VariantSettings
from saccade.bench.serving.serving_stats import main_figures
from saccade.bench.serving.serving_turns import round_seed, run_against, started

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
    """The runs of one load so far, one for each server, in order. A load that is alone has no name. `left` names the
    started servers that have yet to finish it. Only servers that took turns are compared."""

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

    def ratios(self, run: ServingRun) -> Mapping[str, Ratio]:
        """Compares the first server with that of `run`, by figure."""
        return self.comparison.ratios.get(run.name, {}) if self.comparison is not None else {}

    def keep(self, comparison: Comparison) -> None:
        self.comparison, self.runs = comparison, comparison.runs


def new_results(plans: Mapping[str, ServingPlan], variants: VariantSettings) -> list[LoadResult]:
    """A result to fill for each load. Each named load has its own content, so that none hits what another left in a
    cache."""
    found = []
    for number, (name, plan) in enumerate(plans.items()):
        seed = round_seed(plan.workload.seed, number) if name else plan.workload.seed
        own = replace(plan, workload=replace(plan.workload, seed=seed))
        found.append(LoadResult(name, own, list(variants.flags_by_name())))
    return found


def run_loads(
    results: Sequence[LoadResult],
    variants: VariantSettings,
    against: AgainstSettings,
    shown: Shown,
    save: Callable[[], None],
) -> None:
    """Runs all loads and fills their results. `save` is called whenever a server has finished a load."""
    for server in variants.flags_by_name():
        with started(variants, server, shown) as measure:
            for result in results:
                if result.name:
                    shown.say(f"load: {result.name}")
                if against.against:
                    run_against(result.plan, against, shown, result.keep)
                else:
                    result.runs.append(measure(result.plan))
                result.left.remove(server)
                for run in result.runs if against.against else result.runs[-1:]:
                    _tell(result, run, shown)
                save()


def unfinished(results: Sequence[LoadResult]) -> list[str]:
    """The names of unfinished loads and servers, where they have any."""
    left = [(result.name, server) for result in results for server in result.left]
    return [f"{load} ({server})" if load and server else load or server for load, server in left]


def _tell(result: LoadResult, run: ServingRun, shown: Shown) -> None:
    name = ": ".join(filter(None, (result.name, run.name))) or "finished"
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


def loads_data(results: Sequence[LoadResult], *, is_detailed: bool = False) -> dict[str, Any]:
    """All loads that have figures."""
    left = unfinished(results)
    loads = [{"name": result.name, **_data(result, is_detailed)} for result in results if result.runs]
    return {"is_complete": not left, "unfinished": left, "loads": loads}


def _data(result: LoadResult, is_detailed: bool) -> dict[str, Any]:
    if result.comparison is not None:
        return comparison_data(result.comparison, is_detailed=is_detailed)
    return {"targets": [as_data(run, is_detailed=is_detailed) for run in result.runs]}


def _figure(value: Any, digits: int) -> str:
    return f"{value:.{digits}f}" if isinstance(value, int | float) and value else ""


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    return f"[{COLOURS[ratio.verdict]}]{ratio.ratio:.2f}[/] {_interval(ratio)}"


def _interval(ratio: Ratio) -> str:
    return f"({ratio.low:.2f} to {ratio.high:.2f})"

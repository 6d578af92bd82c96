"""`saccade verify` compares every graph with eager runs; `saccade audit` finds host values that graphs froze."""

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from saccade.cli.model import engine_parser, engine_settings
from saccade.cli.parser import Parser, settings_from
from saccade.config import setting
from saccade.models.folder import find_model
from saccade.scheduling.orders import AuditGraphs, GraphCheck, VerifyGraphs
from saccade.terminal import Output, print_json, print_table, shown_progress, stages
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings

if TYPE_CHECKING:
    from saccade.execution.build import Built
    from saccade.graphs import AuditReport, VerifyReport

EXIT_WRONG = 1
OnGraph = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifySettings:
    """How much to check."""

    short: bool = setting(False, "check a sample, as every start on a GPU does")
    json: bool = setting(False, "print JSON")


ABOUT = {
    "verify": (
        "Replay every graph of a model and compare it bit for bit with an eager run, in sequences of batches: equal "
        "totals with different boundaries and back, small-large-small, poisoned padding, shuffled order over all "
        "buckets, other image shapes, videos, repeated images. Then audit the graphs, as `saccade audit` does. With "
        "--tensor-parallel-size, all ranks do so together; what is wrong on one of them is shown with its number."
    ),
    "audit": (
        "Capture every graph of a model again with different inputs and compare the captures node by node: kernels, "
        "grids, arguments, copies, fills. A difference is a host value that was frozen; the finding names the node and "
        "the argument. An audit needs no reference output, and finds errors that no replay shows."
    ),
}


def new_parser(name: str) -> Parser:
    return engine_parser(name, ABOUT[name], VerifySettings)


def run(flags: Namespace) -> int:
    asked, console = settings_from(flags, VerifySettings), Console(stderr=True)
    report: VerifyReport | None = None
    with loaded(*engine_settings(flags), console) as built:
        if flags.command == "verify":
            report = timed(built, VerifyGraphs(asked.short), "verifying", console)
        audited: AuditReport = timed(built, AuditGraphs(asked.short), "auditing", console)
    is_right = audited.is_right and (report is None or report.is_right)
    if asked.json:
        audit = {"right": audited.is_right, "nodes": audited.num_nodes, "rows": _rows_data(audited)}
        print_json(audit if report is None else {"right": is_right, "rows": _rows_data(report), "audit": audit})
    else:
        if report is not None:
            show(Output(), report)
        show_audit(Output(), audited)
    return 0 if is_right else EXIT_WRONG


@contextmanager
def loaded(model: str, engine: EngineSettings, limits: SchedulerSettings, console: Console) -> "Iterator[Built]":
    """Loads the model without any check of its graphs: what is wrong belongs in the report."""
    from saccade.execution.build import build_engine  # imports torch
    from saccade.inputs.processor import Processor

    with stages(console, f"loading {model}"):
        folder = find_model(model, revision=engine.revision, download_dir=engine.download_dir)
        processor = Processor.from_folder(folder, chat_template=engine.chat_template)
        engine = replace(engine, verify="off")
        built = build_engine(folder, engine, limits, processor=processor, compares_ranks=False)
    with closing(built):
        yield built


def check(built: "Built", orders: GraphCheck, on_graph: OnGraph = lambda *news: None) -> Any:
    """Has all ranks check their graphs together. Returns what they found."""
    executor = built.engine.executor
    assert built.executor.checks is not None, "every engine has checks"
    built.executor.checks.on_graph = on_graph
    try:
        return executor.execute(orders)
    except Exception:
        executor.require_device()  # if another rank is the cause, raises that
        raise


def timed(built: "Built", orders: GraphCheck, verb: str, console: Console) -> Any:
    started = monotonic()
    with shown_progress(console) as hear:
        report = check(built, orders, lambda phase, done, total: hear(f"{verb} {phase}", done, total))
    console.print(f"{verb} took {monotonic() - started:.1f} s", highlight=False)
    return report


def _rows_data(report: "AuditReport | VerifyReport") -> list[dict[str, object]]:
    return [{**asdict(row), "right": row.is_right} for row in report.rows]


def show_audit(console: Console, report: "AuditReport") -> None:
    """Prints a line for each finding, and how much was checked."""
    for row in report.rows:
        for finding in row.findings:
            console.print(f"[{row.key}] {finding}", markup=False, highlight=False, soft_wrap=True)
    num_findings = sum(len(row.findings) for row in report.rows)
    verdict = "no varying value is frozen" if report.is_right else f"{num_findings} FINDINGS"
    found = f"{report.num_nodes} nodes of {len(report.rows)} graphs and runs audited: {verdict}"
    console.print(found if report.rows else "there are no graphs to audit", markup=False)


def show(console: Console, report: "VerifyReport") -> None:
    """Prints a line for each graph, with its worst sequence."""
    table = Table("graph", "sequences", "batches", "largest difference", "worst sequence", "correct")
    for key in dict.fromkeys(row.key for row in report.rows):
        rows = [row for row in report.rows if row.key == key]
        worst = max(rows, key=lambda row: (not row.is_right, row.difference))
        is_right = all(row.is_right for row in rows)
        batches = sum(row.num_batches for row in rows)
        verdict = "yes" if is_right else f"NO {worst.problem}"
        table.add_row(key, str(len(rows)), str(batches), f"{worst.difference:.1e}", worst.sequence, verdict)
    print_table(console, table)
    wrong = sum(not row.is_right for row in report.rows)
    verdict = "every replay matches its eager run" if report.is_right else f"{wrong} checks FAILED"
    console.print(f"{len(report.rows)} checks: {verdict}" if report.rows else "there are no graphs to verify")

"""`saccade bench soak`: starts or finds a server, runs, prints and saves the report, and returns the exit code."""

import asyncio
from collections.abc import Callable
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from saccade.bench.load.client_connection import ServerAddress
from saccade.bench.load.startup_server import LaunchedServer
from saccade.bench.soak.soak_run import Soak
from saccade.bench.soak.soak_samples import listener
from saccade.bench.soak.soak_settings import SoakSettings
from saccade.bench.soak.soak_verdict import SoakReport, shown
from saccade.errors import ConfigError
from saccade.terminal import check_file, print_table, stages, write_json

EXIT_FOUND = 1
HELD = ("at the start", "first", "last", "change", "allowed", "flat", "largest")


def bench_soak(model: str, settings: SoakSettings, console: Console) -> int:
    """Returns 0 only if every answer was expected and every resource is flat. An empty `model` is the bundled one."""
    if settings.url and (model or settings.serve_args):
        raise ConfigError(
            "a running server already has its model and flags; leave out MODEL and --serve-args, or --url"
        )
    check_file(settings.json)
    with stages(Console(stderr=True), "starting") as say:
        if settings.url:
            address = ServerAddress.of(settings.url, "--url")
            report = asyncio.run(Soak(settings.url, settings, listener(address.host, address.port), say).run())
        else:
            report = _with_server(model, settings, say)
    print_soak(report, console)
    if settings.json:
        write_json(settings.json, asdict(report) | {"is_clean": report.is_clean})
    return 0 if report.is_clean else EXIT_FOUND


def print_soak(report: SoakReport, console: Console) -> None:
    answers = Table("requests", "answers", title="every answer by kind")
    for kind, outcomes in sorted(report.answers.items()):
        answers.add_row(kind, ", ".join(f"{outcome}: {number}" for outcome, number in sorted(outcomes.items())))
    print_table(console, answers)
    held = Table("when idle", *HELD, title="resources of the server")
    for one in report.resources:
        flat = "?" if one.is_flat is None else "yes" if one.is_flat else "NO"
        figures = (one.first, one.last, one.last - one.first, one.allowance)
        start = "" if one.start is None else shown(one.name, one.start)
        words = (shown(one.name, value) for value in figures)
        held.add_row(one.name, start, *words, flat, shown(one.name, one.peak))
    print_table(console, held)
    for line in _summary(report):
        console.print(line, markup=False, highlight=False)
    bad = [f"request {one.index} ({one.kind}): {one.message}" for one in report.unexpected]
    if report.num_unexpected > len(bad):
        bad.append(f"and {report.num_unexpected - len(bad)} more unexpected answers")
    bad += report.problems + [f"not flat: {one.name}" for one in report.resources if one.is_flat is False]
    for line in bad:
        console.print(line, style="bold red", markup=False, highlight=False)
    console.print("no problems found" if report.is_clean else "problems found", style="bold")


def _summary(report: SoakReport) -> list[str]:
    ended = ", ended by Ctrl-C" if report.is_interrupted else ""
    sizes = f", images of {report.image_sizes} sizes" if report.image_sizes else ""
    lines = [f"{report.requests} requests in {report.seconds:.0f} s{sizes} (--seed {report.seed}){ended}"]
    lines.append(f"{report.idle_moments} idle moments after warm-up; first and last are medians of a third of them")
    if not report.resources:
        lines.append("the server's resources could not be read: it is on another machine, or was never idle")
    lines.append(f"/health: median {report.health_median_ms:.1f} ms, largest {report.health_largest_ms:.1f} ms")
    return lines


def _with_server(model: str, settings: SoakSettings, say: Callable[[str], None]) -> SoakReport:
    def say_start(line: str) -> None:
        if not server.url:
            say(line)

    server = LaunchedServer(model, settings.serve_args, timeout_s=settings.start_timeout_s, say=say_start)
    with server:
        report = asyncio.run(Soak(server.url, settings, server.pid, say).run())
        if server.has_ended:
            report.problems.append("the server has exited; its last lines:\n" + server.last_lines)
    return report

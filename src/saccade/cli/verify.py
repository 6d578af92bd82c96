"""`saccade verify`: every graph against an eager run."""

import json
import sys
from argparse import Namespace
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from saccade.cli.aliases import add_aliases
from saccade.cli.model import BUNDLED_LIMITS, MODEL_WORD, chosen_model
from saccade.cli.parser import Parser, settings_from
from saccade.config import setting
from saccade.engine.settings import EngineSettings, SchedulerSettings
from saccade.terminal import Output, print_table, progress_bar, stages

if TYPE_CHECKING:
    from saccade.engine.engine import Engine
    from saccade.graphs import Report

EXIT_WRONG = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifySettings:
    """How much `saccade verify` looks at."""

    short: bool = setting(False, "a sample, as every start on a GPU takes one")
    json: bool = setting(False, "print JSON")


def new_parser(name: str) -> Parser:
    about = (
        "Replay every graph of a model and compare it with an eager run: equal totals with other boundaries and back, "
        "small-large-small, poisoned padding, shuffled order over all buckets, other image shapes, videos, repeated "
        "images."
    )
    parser = Parser(name, words=MODEL_WORD, max_words=1, about=about)
    for settings in (VerifySettings, EngineSettings, SchedulerSettings):
        parser.add_settings(settings)
    add_aliases(parser)
    return parser


def run(flags: Namespace) -> int:
    asked = settings_from(flags, VerifySettings)
    own = {} if flags.words else BUNDLED_LIMITS
    engine = replace(settings_from(flags, EngineSettings, own), verify="off")  # what is wrong belongs into the table
    chosen = {**asdict(engine), **asdict(settings_from(flags, SchedulerSettings, own))}
    from saccade import LLM  # imports torch

    model, console = chosen_model(flags.words), Console(stderr=True)
    with ExitStack() as stack:
        with stages(console, f"loading {model}"):
            llm = stack.enter_context(LLM(model, **chosen))
        report = _verify(llm.engine, console, is_short=asked.short)
    if asked.json:
        data = {"right": report.is_right, "rows": [{**asdict(row), "right": row.is_right} for row in report.rows]}
        sys.stdout.write(json.dumps(data, indent=1) + "\n")
    else:
        show(Output(), report)
    return 0 if report.is_right else EXIT_WRONG


def _verify(engine: "Engine", console: Console, *, is_short: bool) -> "Report":
    """With a bar on a terminal, and a line for each phase elsewhere."""
    from saccade.engine.verify import verify_engine

    named: set[str] = set()
    with progress_bar(console) as bar:
        task = bar.add_task("verifying", total=None)

        def hear(phase: str, done: int, total: int) -> None:
            bar.update(task, description=f"verifying {phase}", completed=done, total=total)
            if phase not in named and not console.is_terminal:
                console.print(f"verifying {phase}: {done} of {total} graphs done", highlight=False)
            named.add(phase)

        return verify_engine(engine, is_short=is_short, progress=hear)


def show(console: Console, report: "Report") -> None:
    """One line a graph: its worst sequence."""
    table = Table("graph", "sequences", "batches", "largest difference", "worst sequence", "right")
    for key in dict.fromkeys(row.key for row in report.rows):
        rows = [row for row in report.rows if row.key == key]
        worst = max(rows, key=lambda row: (not row.is_right, row.difference))
        is_right = all(row.is_right for row in rows)
        batches = sum(row.num_batches for row in rows)
        verdict = "yes" if is_right else f"NO {worst.problem}"
        table.add_row(key, str(len(rows)), str(batches), f"{worst.difference:.1e}", worst.sequence, verdict)
    print_table(console, table)
    wrong = sum(not row.is_right for row in report.rows)
    verdict = "every replay is what an eager run is" if report.is_right else f"{wrong} checks FAILED"
    console.print(f"{len(report.rows)} checks: {verdict}" if report.rows else "there are no graphs to verify")

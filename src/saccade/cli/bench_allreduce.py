"""`saccade bench allreduce`: what it costs ranks to add up their tensors."""

import json
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from saccade.bench.pass_settings import AllReduceBenchSettings
from saccade.cli.parser import Parser, settings_from
from saccade.terminal import Output, print_table, stages


def new_parser(name: str) -> Parser:
    parser = Parser(name, about="Sums over ranks by rows: every algorithm, in a graph and out of one.")
    parser.add_settings(AllReduceBenchSettings)
    return parser


def run(flags: Namespace) -> int:
    from saccade.bench.allreduce import run_allreduce_bench  # imports torch

    settings = settings_from(flags, AllReduceBenchSettings)
    console = Output()
    with stages(Console(stderr=True), "starting") as say:
        bench = run_allreduce_bench(settings, say)
    table = Table("rows", "KiB", "algorithm", "us in a graph", "us out of one", "taken", "right")
    for line in bench.lines:
        figures = (f"{line.graph_us:.1f}", f"{line.eager_us:.1f}")
        marks = ("yes" if line.is_taken else "", "yes" if line.is_right else "NO")
        table.add_row(str(line.rows), f"{line.nbytes / 1024:g}", line.algorithm, *figures, *marks)
    print_table(console, table)
    if bench.is_shared:
        console.print(
            f"{bench.environment['ranks']} ranks took turns on one GPU: the sums are right, their times say nothing."
        )
    console.print(" ".join(f"{key}={value}" for key, value in bench.environment.items()))
    if settings.json:
        Path(settings.json).write_text(json.dumps(asdict(bench), indent=1))
    return 0 if all(line.is_right for line in bench.lines) else 1

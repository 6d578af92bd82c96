"""`saccade bench graphs`: the prefill of a made-up model, with and without graphs."""

import json
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from saccade.cli.parser import Parser, settings_from
from saccade.config import GraphBenchSettings
from saccade.terminal import Output, print_table, stages


def new_parser(name: str) -> Parser:
    parser = Parser(
        name, about="The prefill of a made-up model by number of tokens: eager, in pieces and as one graph."
    )
    parser.add_settings(GraphBenchSettings)
    return parser


def run(flags: Namespace) -> int:
    from saccade.bench.graph_bench import run_graph_bench  # imports torch

    settings = settings_from(flags, GraphBenchSettings)
    console = Output()
    with stages(Console(stderr=True), "starting") as say:
        bench = run_graph_bench(settings, say)
    table = Table("tokens", "way", "ms", "host ms", "capture s", "graph MiB", "equals eager")
    for line in bench.lines:
        figures = (f"{line.ms:.2f}", f"{line.cpu_ms:.2f}", f"{line.capture_s:.2f}", f"{line.graph_mib:.0f}")
        table.add_row(str(line.tokens), line.way, *figures, "yes" if line.equals_eager else "NO")
    print_table(console, table)
    for way, mib in bench.held_mib.items():
        console.print(f"{way}: {mib:.0f} MiB held beyond the weights (arena and all graphs)")
    console.print(" ".join(f"{key}={value}" for key, value in bench.environment.items()))
    if settings.json:
        Path(settings.json).write_text(json.dumps(asdict(bench), indent=1))
    return 0

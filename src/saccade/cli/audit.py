"""`saccade audit`: what the graphs of a model froze, read from the graphs."""

import json
import sys
from argparse import Namespace

from rich.console import Console

from saccade.cli.parser import Parser, settings_from
from saccade.cli.verify import (
    EXIT_WRONG,
    VerifySettings,
    audit_data,
    checking_parser,
    loaded_executor,
    show_audit,
    shown_progress,
)
from saccade.terminal import Output


def new_parser(name: str) -> Parser:
    about = (
        "Capture every graph of a model again with other inputs and compare the captures node by node: kernels, grids, "
        "arguments, copies, fills. What differs is a host value that was frozen; the finding names node and argument. "
        "It needs no reference output, and finds what no replay shows."
    )
    return checking_parser(name, about)


def run(flags: Namespace) -> int:
    asked, console = settings_from(flags, VerifySettings), Console(stderr=True)
    from saccade.execution.verification import audit_graphs  # imports torch

    with loaded_executor(flags, console) as executor, shown_progress(console, "auditing") as hear:
        report = audit_graphs(executor, is_short=asked.short, progress=hear)
    if asked.json:
        sys.stdout.write(json.dumps(audit_data(report), indent=1) + "\n")
    else:
        show_audit(Output(), report)
    return 0 if report.is_right else EXIT_WRONG

"""Prints a table of accuracies after the tests."""

from typing import Any

from rich.console import Console
from rich.table import Table

COLUMNS = (
    "family",
    "graphs",
    "asked",
    "right (95 % interval)",
    "by length (95 % interval)",
    "largest difference",
    "median",
    "other answers",
)
WIDTH = 140


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
    rows = [value for report in reports for name, value in report.user_properties if name == "accuracy"]
    if not rows:
        return
    title = "237 questions of BIG-bench; differences of log-likelihoods and of answers from graphs off, per question"
    table = Table(*COLUMNS, title=title)
    for row in rows:
        table.add_row(*row, end_section=row[1] == "stale")
    console = Console(width=WIDTH)
    console.print()
    console.print(table)

"""The tables of `saccade eval`."""

from collections import Counter

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from saccade.eval.results import EvalReport, TaskResult
from saccade.terminal import print_table

MAX_LABELS = 12
MAX_WRONG = 5
MAX_DIFFERENCES = 20


def print_eval(report: EvalReport, console: Console) -> None:
    print_table(console, _accuracy_table(report))
    for result in report.tasks:
        if result.skipped:
            console.print(f"{result.name}: skipped, {result.skipped}")
        elif result.right < result.total:
            print_table(console, _confusion_table(result))
    if len(report.results) > 1:
        _print_differences(report, console)


def _accuracy_table(report: EvalReport) -> Table:
    table = Table("task", "way", "right", "asked", "accuracy", "95 % interval", "s", title="accuracy")
    for way, results in report.results.items():
        for result in results:
            if result.skipped:
                continue
            low, high = result.interval
            figures = (f"{result.accuracy:.1%}", f"{100 * low:.1f}-{high:.1%}", f"{result.seconds:.1f}")
            table.add_row(result.name, way, str(result.right), str(result.total), *figures)
    return table


def _confusion_table(result: TaskResult) -> Table:
    """Expected answers down, given ones across. Lists some wrong answers instead if there are too many labels, if
    choices vary by question, or if other wordings may be right."""
    labels = sorted({answer.expected for answer in result.answers})
    is_free = any(answer.scores or answer.is_right != (answer.said == answer.expected) for answer in result.answers)
    if len(labels) > MAX_LABELS or is_free:
        return _wrong_table(result)
    counts = result.confusions()
    others = sorted({answer.said for answer in result.answers} - set(labels))
    shown = labels + (["(other)"] if others else [])
    table = Table("expected", *shown, title=f"{result.name}: what was said")
    for expected in labels:
        row = [_cell(counts, expected, [said], expected == said) for said in labels]
        if others:
            row.append(_cell(counts, expected, others, False))
        table.add_row(expected, *row)
    return table


def _cell(counts: Counter[tuple[str, str]], expected: str, said: list[str], is_right: bool) -> str:
    count = sum(counts[expected, word] for word in said)
    if not count:
        return "."
    return f"[green]{count}[/green]" if is_right else f"[red]{count}[/red]"


def _wrong_table(result: TaskResult) -> Table:
    table = Table("question", "expected", "said", title=f"{result.name}: some of the wrong answers")
    for answer in [answer for answer in result.answers if not answer.is_right][:MAX_WRONG]:
        table.add_row(*(escape(text) for text in (answer.question, answer.expected, answer.said)))
    return table


def _print_differences(report: EvalReport, console: Console) -> None:
    if gaps := report.score_gaps():
        *others, base = gaps
        shown = ", ".join(f"{way} {gaps[way]:.1e}" for way in others)
        console.print(f"largest difference of a choice's log-likelihood from {base}: {shown}")
    found = report.differences()
    total = sum(result.total for result in report.tasks)
    if not found:
        console.print(f"the same {total} answers in every way: {', '.join(report.results)}")
        return
    table = Table("task", "question", *report.results, title=f"{len(found)} of {total} answers differ")
    for difference in found[:MAX_DIFFERENCES]:
        table.add_row(difference.task, escape(difference.question), *map(escape, difference.said.values()))
    print_table(console, table)

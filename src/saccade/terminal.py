"""Terminal output, in a plain form where there is no terminal or it is narrow."""

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from saccade.errors import ConfigError

NARROW, WIDEST = 60, 10_000


class Output(Console):
    """A command's output. When its reader leaves, as `head` does, the rest is discarded; the exit code is unchanged."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        discard_output()


class _ErrorFile(io.FileIO):
    """Loses what cannot be written: a server goes on when its log's disk is full or its reader leaves, as `tee` may."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or len(data)
        except OSError:
            return len(data)


def keep_going_without_stderr() -> None:
    """Call this once at the start. Whatever the process writes to standard error from then on is never an error."""
    encoding = sys.stderr.encoding
    if sys.stderr is sys.__stderr__:  # nobody has replaced it
        file = io.BufferedWriter(_ErrorFile(2, "w", closefd=False))
        sys.stderr = io.TextIOWrapper(file, encoding, "backslashreplace", line_buffering=True)


def open_missing_streams() -> None:
    """Opens /dev/null for each standard stream that was closed when the process was started, as services do. Otherwise
    sockets take their numbers, and uvloop aborts when it closes one of those."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def warn(text: str) -> None:
    sys.stderr.write(f"warning: {text}\n")


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def check_file(path: str, flags: str = "--json") -> None:
    """Refuses a file to be written at the end of minutes of work before them. An empty path asks for none."""
    if path and (reason := _why_not_writable(Path(path))):
        raise _not_written(path, reason, flags)


def _why_not_writable(file: Path) -> str | None:
    try:
        if file.is_dir():
            return "it is a folder"
        if not file.parent.is_dir():
            return "its folder does not exist"
        may_write = os.access(file if file.exists() else file.parent, os.W_OK)
    except OSError as error:  # such as a name that is too long
        return error.strerror
    return None if may_write else "this user may not write there"


def check_plot(path: str) -> None:
    """As `check_file`, for a picture that matplotlib draws."""
    if path and find_spec("matplotlib") is None:
        raise ConfigError("matplotlib is not installed; `pip install matplotlib` for --plot")
    check_file(path, "--plot")


def write_json(path: Path | str, value: Any, flags: str = "--json", *, makes_folder: bool = False) -> None:
    write_file(path, json.dumps(value, indent=1) + "\n", flags, makes_folder=makes_folder)


def write_file(path: Path | str, text: str, flags: str, *, makes_folder: bool = False) -> None:
    """Writes a file that the user named with `flags`."""
    try:
        if makes_folder:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise _not_written(path, error.strerror, flags) from None


def _not_written(path: Path | str, reason: str | None, flags: str) -> ConfigError:
    return ConfigError(f"{path} cannot be written: {reason} ({flags})")


def discard_output() -> None:
    """Call when standard output has lost its reader: what is still buffered must not raise when Python exits."""
    with suppress(io.UnsupportedOperation):  # not a file, so no pipe
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def print_table(console: Console, table: Table) -> None:
    """Print the table, or, if the console is too narrow for it, a list with one line per cell."""
    for column in table.columns:
        column.overflow = "fold"
        column.no_wrap = " " not in f"{column.header}" and not any(" " in str(cell) for cell in column.cells)
    if _is_readable(console, table):
        table.title_justify = "left"
        console.print(table)
        return
    if table.title:
        console.print(table.title, style="italic")
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        entry = Table.grid(padding=(0, 1))
        entry.add_column(overflow="fold")
        entry.add_column(overflow="fold")
        for column, cell in zip(table.columns, cells, strict=True):
            if cell != "":
                entry.add_row(column.header, cell)
        console.print(entry)
        console.print()


def _is_readable(console: Console, table: Table) -> bool:
    """Whether the table fits, or can be folded without breaking words on a console wide enough for cells."""
    wide = console.options.update(width=WIDEST)
    needed = Measurement.get(console, wide, table)
    return needed.maximum <= console.width or (console.width >= NARROW and needed.minimum <= console.width)


def progress_bar(console: Console | None, refresh_per_s: float = 10) -> Progress:
    """A progress bar, hidden unless a terminal or notebook shows it."""
    has_watcher = console is not None and (console.is_terminal or console.is_jupyter)
    return Progress(
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()),
        *(TimeElapsedColumn(), TimeRemainingColumn()),
        console=console,
        disable=not has_watcher,
        refresh_per_second=refresh_per_s,
    )


@contextmanager
def shown_progress(console: Console | None) -> Iterator[Callable[[str, int, int], None]]:
    """Yields what hears how much is done of how much. A bar shows it, or without a terminal a line for each name."""
    named = set[str]()
    with progress_bar(console) as bar:
        task = bar.add_task("", total=None)

        def hear(name: str, done: int, total: int) -> None:
            bar.update(task, description=name, completed=done, total=total)
            if bar.disable and console is not None and name not in named:
                console.print(f"{name}: {done} of {total}", markup=False, highlight=False)
            named.add(name)

        yield hear


@contextmanager
def stages(console: Console, first: str) -> Iterator[Callable[[str], None]]:
    """Reports stages: one changing line on a terminal, one line per stage elsewhere."""
    if console.is_terminal:
        with console.status(first) as status:
            yield status.update
        return

    def say(stage: str) -> None:
        console.print(stage, markup=False, highlight=False, soft_wrap=True)

    say(first)
    yield say

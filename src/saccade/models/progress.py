"""How far loading is, for whoever wants to know."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

# Called as progress(bytes_done, bytes_total, name of the tensor just placed).
OnProgress = Callable[[int, int, str], None]


def no_progress(bytes_done: int, bytes_total: int, name: str) -> None:
    """Says nothing."""


@contextmanager
def terminal_progress(title: str = "Loading weights", console: Console | None = None) -> Iterator[OnProgress]:
    """A bar with bytes, speed and time left; on something that is no terminal rich prints one line at the end."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console or Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None)

        def show(bytes_done: int, bytes_total: int, name: str) -> None:
            del name
            bar.update(task, completed=bytes_done, total=bytes_total)

        yield show

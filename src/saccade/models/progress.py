"""Progress reports of loading."""

from collections.abc import Callable

# Called as progress(bytes_done, bytes_total, name of the tensor just placed).
OnProgress = Callable[[int, int, str], None]


def no_progress(bytes_done: int, bytes_total: int, name: str) -> None:
    """Reports nothing."""

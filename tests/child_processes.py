"""The processes that a process has started, from the kernel's tables."""

from pathlib import Path


def children(pid: int | str) -> list[int]:
    """Children of any thread. While one of them ends, the kernel may leave out others."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, file.read_text().split())
        except OSError:  # the thread has ended
            continue
    return found


def words_of(pid: int) -> list[bytes]:
    """The command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []

"""Processes, from the kernel's tables: those that a process has started, and whether one is still there."""

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


def gone(pid: int) -> bool:
    """A zombie counts as gone: in a container whose first process waits for nobody, orphans stay zombies."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True

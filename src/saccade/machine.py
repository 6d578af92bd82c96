"""The cores and memory that this process may use: a container or a service may have only a part of the machine's."""

import os
from collections.abc import Iterator
from math import ceil
from pathlib import Path

MEMORY, OWN_GROUPS, GROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """At least 1. A quota, such as that of `docker run --cpus`, counts as that many cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _groups("cpu"):
        words = _words(group / "cpu.max") or _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
        if len(words) == 2 and words[0] not in ("max", "-1"):
            cores = min(cores, max(1, ceil(int(words[0]) / int(words[1]))))
    return cores


def available_bytes() -> int:
    """Host memory that can still be used, or 0 if it is not known."""
    available = 1024 * _figure(MEMORY, "MemAvailable:")
    for group in _groups("memory"):
        limit = _words(group / "memory.max") or _words(group / "memory.limit_in_bytes")
        used = _words(group / "memory.current") or _words(group / "memory.usage_in_bytes")
        if limit and used and limit[0] != "max":
            available = min(available, max(0, int(limit[0]) - int(used[0]) + _cached_bytes(group / "memory.stat")))
    return available


def _cached_bytes(stat: Path) -> int:
    """Contents of files, which Linux drops when memory is needed. Version 1 counts groups below under `total_`."""
    totals = [_figure(stat, f"total_{name}") for name in ("inactive_file", "active_file")]
    return sum(totals) or sum(_figure(stat, name) for name in ("inactive_file", "active_file"))


def _groups(controller: str) -> Iterator[Path]:
    """The control groups that this process is in, and those around them; of version 1, those of the controller. A
    container may see its own group as the root, under whatever name it has outside."""
    for line in _lines(OWN_GROUPS):
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = GROUPS / controller if controllers else GROUPS
            names = path.strip("/").split("/")
            yield from (root.joinpath(*names[:depth]) for depth in range(len(names), -1, -1))


def _figure(file: Path, name: str) -> int:
    return next((int(line.split()[1]) for line in _lines(file) if line.startswith(f"{name} ")), 0)


def _words(file: Path) -> list[str]:
    return " ".join(_lines(file)).split()


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []

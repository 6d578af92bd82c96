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
        version_1 = _figures(group / "cpu.cfs_quota_us") + _figures(group / "cpu.cfs_period_us")
        match _figures(group / "cpu.max") or version_1:
            case [int(quota), int(period)] if period:
                cores = min(cores, max(1, ceil(quota / period)))
    return cores


def available_bytes() -> int:
    """Host memory that can still be used, or 0 if it is not known."""
    available = 1024 * _named(MEMORY, "MemAvailable:")
    for group in _groups("memory"):
        limit = _figures(group / "memory.max") or _figures(group / "memory.limit_in_bytes")
        used = _figures(group / "memory.current") or _figures(group / "memory.usage_in_bytes")
        match limit + used:
            case [int(most), int(held)]:
                available = min(available, max(0, most - held + _cached_bytes(group / "memory.stat")))
    return available


def _cached_bytes(stat: Path) -> int:
    """Contents of files, which Linux drops when memory is needed. Version 1 counts groups below under `total_`."""
    totals = [_named(stat, f"total_{name}") for name in ("inactive_file", "active_file")]
    return sum(totals) or sum(_named(stat, name) for name in ("inactive_file", "active_file"))


def _groups(controller: str) -> Iterator[Path]:
    """The control groups that this process is in, and those around them; of version 1, those of the controller. A
    container may see its own group as the root, under whatever name it has outside."""
    for _, controllers, path in (line.split(":", 2) for line in _lines(OWN_GROUPS) if line.count(":") > 1):
        if not controllers or controller in controllers.split(","):
            root = GROUPS / controller if controllers else GROUPS
            names = path.strip("/").split("/")
            yield from (root.joinpath(*names[:depth]) for depth in range(len(names), -1, -1))


def _named(file: Path, name: str) -> int:
    """The figure behind a name at the beginning of a line, or 0."""
    found = next((line.split()[1:2] for line in _lines(file) if line.startswith(f"{name} ")), [])
    return int(found[0]) if found and found[0].isdecimal() else 0


def _figures(file: Path) -> list[int | None]:
    """What a file has. None stands for "max", -1, and what else is no figure: without a limit that is understood, there
    is none."""
    return [int(word) if word.isdecimal() else None for word in " ".join(_lines(file)).split()]


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(errors="replace").splitlines()
    except OSError:
        return []

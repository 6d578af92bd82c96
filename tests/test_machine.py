"""What a process may use of its machine, in control groups as containers and services have them."""

import os
from pathlib import Path

import pytest

from saccade import machine
from saccade.machine import available_bytes, usable_cores

GIB = 2**30


@pytest.fixture(autouse=True)
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 64 cores and 200 GiB, of which 100 are free."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    for name in ("MEMORY", "OWN_GROUPS", "GROUPS"):
        monkeypatch.setattr(machine, name, tmp_path / name)
    write(tmp_path / "MEMORY", f"MemTotal: {200 * 2**20} kB", f"MemAvailable: {100 * 2**20} kB")
    return tmp_path / "GROUPS"


def write(file: Path, *lines: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{line}\n" for line in lines))


def limit(group: Path, limit: str, used: int, cached: int) -> None:
    write(group / "memory.max", limit)
    write(group / "memory.current", str(used))
    write(group / "memory.stat", "anon 7", f"inactive_file {cached - 5}", "active_file 5", "inactive_file_x 9")


def test_without_control_groups_all_of_the_machine_may_be_used() -> None:
    assert (usable_cores(), available_bytes()) == (64, 100 * GIB)


def test_a_core_that_the_process_may_not_run_on_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5})
    assert usable_cores() == 2


def test_a_container_has_its_own_group_as_the_root(groups: Path) -> None:
    write(machine.OWN_GROUPS, "0::/")
    write(groups / "cpu.max", "400000 100000")
    limit(groups, str(32 * GIB), 10 * GIB, 3 * GIB)
    assert (usable_cores(), available_bytes()) == (4, 25 * GIB)


@pytest.mark.parametrize(("quota", "cores"), [("max", 64), ("50000", 1), ("250000", 3), ("9900000", 64)])
def test_a_quota_counts_as_whole_cores(groups: Path, quota: str, cores: int) -> None:
    write(machine.OWN_GROUPS, "0::/")
    write(groups / "cpu.max", f"{quota} 100000")
    assert usable_cores() == cores


def test_the_tightest_group_around_a_service_counts(groups: Path) -> None:
    write(machine.OWN_GROUPS, "0::/system.slice/saccade.service")
    service, around = groups / "system.slice" / "saccade.service", groups / "system.slice"
    write(service / "cpu.max", "max 100000")
    write(around / "cpu.max", "200000 100000")
    limit(service, str(8 * GIB), 9 * GIB, 5)
    limit(around, "max", 0, 5)
    assert (usable_cores(), available_bytes()) == (2, 0)


@pytest.mark.parametrize("text", ["", "max", "-1 -1", "0 0", "100000 0", "1 2 3", "a b", "\xff"])
def test_what_is_not_understood_is_no_limit(groups: Path, text: str) -> None:
    """Sandboxes and emulated kernels write such files in their own ways."""
    machine.OWN_GROUPS.parent.mkdir(exist_ok=True)
    machine.OWN_GROUPS.write_bytes(b"\xff\n0::/\nx\n9:memory\n")
    write(groups / "cpu.max", text)
    limit(groups, text, 0, 5)
    write(groups / "memory.stat", "inactive_file", "active_file x", text)
    assert (usable_cores(), available_bytes()) == (64, 100 * GIB)
    write(machine.MEMORY, "MemAvailable:")
    assert available_bytes() == 0


def test_version_1_has_a_tree_for_each_controller(groups: Path) -> None:
    write(machine.OWN_GROUPS, "9:memory:/docker/seen-from-outside", "4:cpu,cpuacct:/a/b", "1:name=systemd:/", "0::/")
    write(groups / "cpu" / "a" / "cpu.cfs_quota_us", "300000")
    write(groups / "cpu" / "a" / "cpu.cfs_period_us", "100000")
    write(groups / "cpu" / "cpu.cfs_quota_us", "-1")
    write(groups / "cpu" / "cpu.cfs_period_us", "100000")
    write(groups / "memory" / "memory.limit_in_bytes", str(16 * GIB))
    write(groups / "memory" / "memory.usage_in_bytes", str(6 * GIB))
    write(groups / "memory" / "memory.stat", "inactive_file 1", f"total_inactive_file {GIB}", "total_active_file 0")
    assert (usable_cores(), available_bytes()) == (3, 11 * GIB)

"""requirements.lock: it has every package of the tests, in versions that pyproject.toml allows."""

import re

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tools import lock

LINES = [line for line in lock.LOCK.read_text().splitlines() if line and not line.startswith("#")]
PINNED = dict(line.split("==") for line in LINES)


def test_every_line_is_a_name_and_a_version() -> None:
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line) for line in LINES)
    assert sorted(PINNED) == list(PINNED) and len(PINNED) == len(LINES)


@pytest.mark.parametrize("requirement", lock.declared("dev"), ids=str)
def test_a_declared_requirement_is_locked_to_a_version_it_allows(requirement: Requirement) -> None:
    name = canonicalize_name(requirement.name)
    if not lock.LEFT_OUT.fullmatch(name):
        assert requirement.specifier.contains(Version(PINNED[name])), f"{requirement} is locked to {PINNED[name]}"


def test_requirements_of_locked_packages_are_locked_too() -> None:
    assert set(lock.locked()) <= set(PINNED)

"""Bytecode for a worker's first imports, compiled by several processes."""

import sys
from pathlib import Path

import pytest

from saccade import bytecode
from saccade.bytecode import compile_if_new, compile_share
from saccade.config import BYTECODE_FOLDER


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "bytecode"))
    for name in ("of_bytecode_a", "of_bytecode_b"):
        (tmp_path / "site" / name / "part").mkdir(parents=True)
        for file in ("__init__.py", "x.py", "part/__init__.py", "part/y.py"):
            (tmp_path / "site" / name / file).write_text("raise AssertionError('imported')\n")
    (tmp_path / "site" / "of_bytecode_a" / "broken.py").write_text("def (")
    return "of_bytecode_a", "not_installed", "of_bytecode_b"


def test_all_shares_together_are_the_files_python_looks_for(packages: tuple[str, ...], tmp_path: Path) -> None:
    found = []
    for index in range(3):
        before = set((tmp_path / "bytecode").rglob("*.pyc"))
        compile_share(index, 3, packages)
        found.append(set((tmp_path / "bytecode").rglob("*.pyc")) - before)
    assert all(found)
    assert sum(map(len, found)) == 8, "all but the broken one, none twice"


@pytest.mark.parametrize(
    ("cores", "has_files", "expected"), [(16, False, 8), (8, False, 4), (2, False, 0), (16, True, 0)]
)
def test_only_an_empty_folder_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, has_files: bool, expected: int
) -> None:
    started: list[tuple[str, ...]] = []
    monkeypatch.setattr(bytecode, "start_python", lambda *words, environment: started.append(words))
    monkeypatch.setattr(bytecode, "_reap", lambda processes: None)
    monkeypatch.setattr(bytecode, "usable_cores", lambda: cores)
    if has_files:
        (tmp_path / "home").mkdir()
    compile_if_new({BYTECODE_FOLDER: str(tmp_path)})
    assert started == [(bytecode.MODULE, str(i), str(expected)) for i in range(expected)]


def test_nothing_is_started_where_python_writes_bytecode_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bytecode, "start_python", None)
    compile_if_new({})

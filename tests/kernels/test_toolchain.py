"""A machine on which Triton cannot compile C is told what to install."""

import sysconfig
from pathlib import Path
from typing import Any

import pytest

from saccade.errors import ConfigError
from saccade.kernels.toolchain import load_triton_driver, missing_tools

runtime: Any = pytest.importorskip("triton.runtime")


class NoDriver:
    @property
    def active(self) -> None:
        raise RuntimeError("Failed to find C compiler.")


@pytest.fixture(autouse=True)
def has_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with a compiler and headers, the only ones that are there."""
    for name in ("gcc", "Python.h"):
        (tmp_path / name).write_text("")
    (tmp_path / "gcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(runtime, "driver", NoDriver())
    return tmp_path


@pytest.mark.parametrize("word", [None, "gcc"])
def test_nothing_is_missing(monkeypatch: pytest.MonkeyPatch, word: str | None) -> None:
    if word:
        monkeypatch.setenv("CC", word)
    assert missing_tools() == ("", "")


def test_a_missing_compiler_is_named(has_tools: Path) -> None:
    (has_tools / "gcc").unlink()
    with pytest.raises(ConfigError, match=r"cannot compile its driver: there is no C compiler; install one \(apt-get"):
        load_triton_driver()


def test_a_compiler_that_cc_names_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert missing_tools()[0] == "there is no C compiler"


def test_missing_headers_are_named(has_tools: Path) -> None:
    (has_tools / "Python.h").unlink()
    with pytest.raises(ConfigError, match=r"Python's headers are missing \(.*Python\.h\); install them \(apt-get"):
        load_triton_driver()


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="Failed to find C compiler"):
        load_triton_driver()

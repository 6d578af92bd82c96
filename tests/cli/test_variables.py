"""Variables of other engines that are set get a line each."""

from pathlib import Path

import pytest

from saccade.cli import main
from saccade.cli.aliases import INSTEAD, variable_notes
from saccade.config import FOREIGN_PREFIXES


def test_each_variable_that_is_set_gets_one_line_without_its_value() -> None:
    set_ = {"SGLANG_VLM_CACHE_SIZE_MB": "0", "VLLM_API_KEY": "secret", "VLLM_ODD": "1", "SGLANG_PORT": "", "OTHER": "1"}
    notes = variable_notes(set_)
    assert [note.split()[0] for note in notes] == ["SGLANG_VLM_CACHE_SIZE_MB", "VLLM_API_KEY", "VLLM_ODD"]
    assert "use --encoder-cache-tokens; 0 keeps no image" in notes[0] and "NO KEY is taken from it" in notes[1]
    assert "SACCADE_ variables" in notes[2] and "secret" not in "".join(notes)


def test_what_is_explained_is_what_is_found() -> None:
    assert all(name.startswith(FOREIGN_PREFIXES) for name in INSTEAD)


def test_a_server_says_so_when_it_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("SGLANG_MM_FEATURE_CACHE_MB", "SGLANG_VIT_ENABLE_CUDA_GRAPH"):
        monkeypatch.setenv(name, "1")
    assert main(["serve", str(tmp_path / "nothing"), "--port", "0"]) == 2
    lines = capsys.readouterr().err.splitlines()
    for name in ("SGLANG_MM_FEATURE_CACHE_MB", "SGLANG_VIT_ENABLE_CUDA_GRAPH"):
        assert lines.count(f"warning: {name} changes nothing: {INSTEAD[name]}") == 1

"""Variables of other engines that are set get a line each."""

from pathlib import Path

import pytest

from saccade.cli import main
from saccade.cli.aliases import INSTEAD, unknown_variables, variable_notes
from saccade.config import FOREIGN_PREFIXES
from saccade.server.server_settings import ServerSettings


def test_each_variable_that_is_set_gets_one_line_without_its_value() -> None:
    set_ = {"SGLANG_VLM_CACHE_SIZE_MB": "0", "VLLM_API_KEY": "secret", "VLLM_ODD": "1", "SGLANG_PORT": "", "OTHER": "1"}
    notes = variable_notes(set_)
    assert [note.split()[0] for note in notes] == ["SGLANG_VLM_CACHE_SIZE_MB", "VLLM_API_KEY", "VLLM_ODD"]
    assert "use --encoder-cache-tokens; 0 keeps no image" in notes[0] and "it sets NO KEY" in notes[1]
    assert "SACCADE_ variables" in notes[2] and "secret" not in "".join(notes)


def test_a_misspelt_variable_gets_a_line() -> None:
    names = ["SACCADE_API_KEYS", "SACCADE_PORT", "SACCADE_CONFIG", "SACCADE_XYZ"]
    assert unknown_variables([ServerSettings], dict.fromkeys(names, "secret") | {"SACCADE_EMPTY": ""}) == [
        "SACCADE_API_KEYS changes nothing: there is no --api-keys; did you mean --api-key or --admin-api-key?",
        "SACCADE_XYZ changes nothing: there is no --xyz",
    ]


def test_what_is_explained_is_what_is_found() -> None:
    assert all(name.startswith(FOREIGN_PREFIXES) for name in INSTEAD)


def test_a_server_says_so_when_it_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("SGLANG_MM_FEATURE_CACHE_MB", "SGLANG_VIT_ENABLE_CUDA_GRAPH"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SACCADE_API_KEYS", "secret")
    assert main(["serve", str(tmp_path / "nothing"), "--port", "0"]) == 2
    lines = capsys.readouterr().err.splitlines()
    for name in ("SGLANG_MM_FEATURE_CACHE_MB", "SGLANG_VIT_ENABLE_CUDA_GRAPH"):
        assert lines.count(f"warning: {name} changes nothing: {INSTEAD[name]}") == 1
    [line] = [line for line in lines if "SACCADE_API_KEYS" in line]
    assert line.startswith("warning: SACCADE_API_KEYS changes nothing: ") and "--api-key" in line

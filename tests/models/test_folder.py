"""Where checkpoints are found: in a local folder, or on the hub at a revision."""

from pathlib import Path
from typing import Any, NoReturn

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils._paths import filter_repo_objects

from saccade import bundled
from saccade.cli import main
from saccade.errors import ConfigError
from saccade.models.folder import find_folder, find_model


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """What the hub was asked for; nothing is fetched."""
    calls: list[dict[str, Any]] = []

    def download(name: str, **how: Any) -> str:
        calls.append({"name": name, **how})
        if how["revision"] == "gone":
            raise LocalEntryNotFoundError("no")
        if how["revision"] == "broken":
            raise RuntimeError("Data processing error: the connection was reset")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


def test_an_error_of_a_transfer_is_not_taken_for_a_missing_home(asked: list[dict[str, Any]]) -> None:
    """The hub's package for large files raises RuntimeError, as pathlib does for a user without a home."""
    with pytest.raises(ConfigError, match=r"check the name, the network and the disk") as caught:
        find_folder("org/name", revision="broken")
    assert "HF_HOME" not in str(caught.value)


def test_revision_and_download_folder_are_passed_to_the_hub(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    assert find_folder("org/name") == tmp_path
    assert find_folder("org/name", revision="v2", download_dir="/there") == tmp_path
    found = [(call["name"], call["revision"], call["cache_dir"]) for call in asked]
    assert found == [("org/name", None, None), ("org/name", "v2", "/there")]
    told = r"org/name at revision gone is neither a folder nor a hub repository .*the hub cannot be reached"
    with pytest.raises(ConfigError, match=told):
        find_folder("org/name", revision="gone")


def test_an_unsupported_model_is_refused_before_its_weights_are_fetched(
    asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["OtherModel"]}')
    with pytest.raises(ConfigError, match="architecture OtherModel is not known"):
        find_model("org/name", revision="v2")
    assert [(call["revision"], "*.safetensors" in call["allow_patterns"]) for call in asked] == [("v2", False)]
    (tmp_path / "config.json").write_bytes((bundled.path() / "config.json").read_bytes())
    assert find_model("org/name", revision="v2") == tmp_path
    assert "*.safetensors" in asked[-1]["allow_patterns"]


def test_weights_in_folders_of_a_repository_are_not_fetched(asked: list[dict[str, Any]]) -> None:
    """Original formats and checkpoints of a training can be many times as large as the model."""
    find_folder("org/name")
    patterns = {key: asked[-1][key] for key in ("allow_patterns", "ignore_patterns")}
    files = ["config.json", "model.safetensors", "additional_chat_templates/tool_use.jinja"]
    others = ["original/consolidated.safetensors", "checkpoint-500/model.safetensors", "model.py"]
    assert list(filter_repo_objects([*files, *others], **patterns)) == files


def test_a_revision_of_a_local_folder_is_refused(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    assert find_folder(tmp_path) == tmp_path
    with pytest.raises(ConfigError, match=r"revision is v2, but .* is a local folder.*leave --revision out"):
        find_folder(tmp_path, revision="v2")
    assert not asked


@pytest.mark.parametrize("command", ["plan", "explain", "serve", "run"])
def test_commands_pass_the_revision_on(
    command: str, asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"serve": ["--port", "0"], "run": ["hello"]}.get(command, [])
    status = main([command, "org/name", *more, "--revision", "gone", "--download-dir", "/there"])
    assert status == 2 and "org/name at revision gone" in " ".join(capsys.readouterr().err.split())
    assert [(call["revision"], call["cache_dir"]) for call in asked] == [("gone", "/there")]


def test_an_unreadable_file_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("config.json", "notes.md", "model.safetensors"):
        (tmp_path / name).touch()
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).name == "config.json")
    with pytest.raises(ConfigError, match=r"user \d+ may not read .*/model\.safetensors; let that user"):
        find_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert find_folder(tmp_path) == tmp_path


def test_an_unreadable_folder_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(path: Path) -> NoReturn:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(ConfigError, match=rf"user \d+ may not read {tmp_path}; "):
        find_folder(tmp_path)

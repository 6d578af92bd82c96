import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from saccade import bundled
from saccade.cli import main
from saccade.cli.models import size_text

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cached(cache: Path, name: str, config: dict[str, Any] | None, *, with_weights: bool = True) -> Path:
    """A model in the layout of the hub's cache."""
    repository = cache / f"models--{name.replace('/', '--')}"
    folder = repository / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if with_weights:
        (folder / "model.safetensors").write_bytes(bytes(1000))
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    config = json.loads((bundled.path() / "config.json").read_text())
    cached(tmp_path, "a/whole", config)
    cached(tmp_path, "b/half", config, with_weights=False)
    cached(tmp_path, "c/odd", {"architectures": ["OddForCausalLM"]})
    cached(tmp_path, "d/empty", None)
    return tmp_path


def test_models_of_the_cache_are_listed(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--download-dir", str(cache), "--json"]) == 0
    found = {model["name"]: model for model in json.loads(capsys.readouterr().out)}
    assert list(found) == ["(bundled)", "a/whole", "b/half", "c/odd", "d/empty"]
    assert found["(bundled)"]["problem"] == found["a/whole"]["problem"] == ""
    assert found["a/whole"]["architecture"] == found["(bundled)"]["architecture"] != ""
    assert found["a/whole"]["num_bytes"] > 1000
    assert "*.safetensors" in found["b/half"]["problem"]
    assert found["c/odd"]["problem"].startswith("no: architecture OddForCausalLM is not known")
    assert "it has no config.json" in found["d/empty"]["problem"]


def test_the_list_is_a_table(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--download-dir", str(cache)]) == 0
    shown = capsys.readouterr().out
    assert "a/whole" in shown and "(bundled)" in shown and "yes" in shown


def test_without_a_cache_there_is_the_bundled_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--download-dir", str(tmp_path / "none"), "--json"]) == 0
    assert [model["name"] for model in json.loads(capsys.readouterr().out)] == ["(bundled)"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Patterns that the hub was asked for. It has the bundled model as org/name, and org/odd."""
    calls: list[list[str]] = []

    def download(name: str, *, allow_patterns: list[str], **how: Any) -> str:
        calls.append(allow_patterns)
        if name == "org/odd":
            folder = tmp_path / "odd"
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text('{"architectures": ["OddForCausalLM"]}')
            return str(folder)
        if name != "org/name":
            raise LocalEntryNotFoundError("no") from ConnectionError("no network")
        shutil.copytree(bundled.path(), tmp_path / "fetched", dirs_exist_ok=True)
        return str(tmp_path / "fetched")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


def test_pull_fetches_what_is_needed(asked: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "org/name"]) == 0
    assert "*.safetensors" not in asked[0] and "*.safetensors" in asked[1]
    assert not any(ending in pattern for pattern in asked[1] for ending in (".py", ".bin", ".pt"))
    assert "saccade serve org/name" in capsys.readouterr().err


def test_weights_of_an_unknown_family_are_not_fetched(
    asked: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pull", "org/odd"]) == 2
    assert len(asked) == 1 and "OddForCausalLM is not known" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "saccade pull org/name"),
        (["org/gone"], "the hub cannot be reached (ConnectionError); check the network"),
        (["."], "is a local folder"),
    ],
)
def test_what_cannot_be_fetched_is_said(
    words: list[str], message: str, asked: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pull", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("num_bytes", "text"), [(0, "0.0 MB"), (26_400_000, "26.4 MB"), (17_500_000_000, "17.5 GB")])
def test_sizes_are_read_by_people(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text

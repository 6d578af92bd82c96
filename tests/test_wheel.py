"""What is published: a wheel with everything that a server needs, and nothing else."""

import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from trove_classifiers import classifiers

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEEDED = (
    "saccade/__init__.py",
    "saccade/py.typed",
    "saccade/bundled/checkpoint/config.json",
    "saccade/bundled/checkpoint/model.safetensors",
    "saccade/bundled/checkpoint/tokenizer.json",
    "saccade/bundled/checkpoint/chat_template.jinja",
    "saccade/eval/knowledge.json",
    "saccade/server/page/index.html",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [found] = folder.glob("*.whl")
    return found


def test_a_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert set(NEEDED) <= names
    sources = (path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert {str(path.relative_to(ROOT / "src")) for path in sources} <= names


def test_a_wheel_has_nothing_but_the_package_its_metadata_and_the_license(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"saccade", "saccade_vlm"}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if {"tests", "__pycache__"} & set(Path(name).parts)]


def test_its_metadata_name_the_command_and_extras_of_its_own(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [entry] = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        [text] = [name for name in archive.namelist() if name.endswith("METADATA")]
        assert "saccade = saccade.cli:main" in archive.read(entry).decode()
        metadata = Parser().parsestr(archive.read(text).decode())
    assert metadata["Name"] == PROJECT["name"] and metadata["License-Expression"] == "Apache-2.0"
    assert "# Saccade" in metadata.get_payload()
    needs = metadata.get_all("Requires-Dist") or []
    assert not [need for need in needs if need.split("[")[0] == "saccade"], "another project's name"


def test_classifiers_are_known_to_the_registry() -> None:
    assert set(PROJECT["classifiers"]) <= classifiers


def test_texts_that_name_an_extra_name_one_of_this_project() -> None:
    texts = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert "saccade[" not in texts, f"the distribution is {PROJECT['name']}"
    assert f"{PROJECT['name']}[cuda]" in texts

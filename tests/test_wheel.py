"""What is published: a wheel with everything that a server needs, and nothing else."""

import subprocess
import sys
import tomllib
import venv
import zipfile
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path

import pytest
from trove_classifiers import classifiers

from tools import lock

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


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with only the wheel and its dependencies, in the versions of the tests."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    for name in lock.installed(lock.declared()):
        here = distribution(name)
        for part in {file.parts[0] for file in here.files or ()} - {"..", "__pycache__"}:
            if not (packages / part).exists():
                (packages / part).symlink_to(Path(str(here.locate_file(part))).resolve())
    into = ["--python", str(folder / "bin" / "python")]
    command = [sys.executable, "-m", "pip", *into, "install", "--no-deps", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def in_clean(clean: Path, home: Path, program: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs a program of the environment without the tests' environment variables."""
    command, variables = [str(clean / "bin" / program), *words], {"HOME": str(home), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, cwd=home, env=variables, capture_output=True, text=True, timeout=600, check=False)


def test_a_bare_wheel_answers_a_question_about_a_picture(clean: Path, tmp_path: Path) -> None:
    found = in_clean(clean, tmp_path, "python", "-c", "import saccade; print(saccade.__file__)")
    assert Path(found.stdout.strip()).is_relative_to(clean), found
    assert in_clean(clean, tmp_path, "python", "-c", "import pytest").returncode != 0, "it is not clean"
    picture = ROOT / "examples" / "pictures" / "digit.png"
    done = in_clean(clean, tmp_path, "saccade", "run", "--image", str(picture), "What digit is this?")
    assert (done.returncode, done.stdout) == (0, "7\n"), done


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


def test_the_metadata_name_the_command_and_the_extras(wheel: Path) -> None:
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


def test_every_mentioned_extra_exists() -> None:
    texts = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert "saccade[" not in texts, f"the distribution is {PROJECT['name']}"
    assert f"{PROJECT['name']}[cuda]" in texts

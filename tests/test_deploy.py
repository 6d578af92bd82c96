"""Container images and services, as far as they can be checked without starting them."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from saccade.cli.commands import find_command, new_parser
from saccade.config import environment
from tests.test_lock import PINNED

ROOT = Path(__file__).parents[1]
DOCKERFILES = [ROOT / "Dockerfile", ROOT / "deploy" / "Dockerfile.cpu"]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
# Keys of the Compose specification that are used here.
SERVICE_KEYS = {
    *("build", "cap_drop", "command", "deploy", "environment", "healthcheck", "image", "init", "ipc", "ports"),
    *("profiles", "read_only", "restart", "security_opt", "stop_grace_period", "tmpfs", "volumes"),
}
HEALTH_KEYS = {"test", "interval", "timeout", "retries", "start_period"}
INSTRUCTIONS = {
    *("ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "RUN", "STOPSIGNAL", "USER"),
    "WORKDIR",
}


def instructions(path: Path) -> list[tuple[str, str]]:
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines())]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_copies_files_that_exist_and_are_sent_to_the_builder(path: Path) -> None:
    found = instructions(path)
    assert {name for name, _ in found} <= INSTRUCTIONS and found[0][0] in ("ARG", "FROM")
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [word for name, rest in found if name == "COPY" for word in rest.split()[:-1]]
    assert set(copied) <= sent and {"src", "pyproject.toml", "README.md", "LICENSE"} <= set(copied)
    assert [name for name in copied if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_runs_a_command_that_exists_and_not_as_root(path: Path) -> None:
    found = dict(instructions(path))
    assert found["USER"] == "saccade" and found["ENTRYPOINT"] == '["saccade"]'
    words = yaml.safe_load(found["CMD"])
    name, rest = find_command(words)
    assert new_parser(name).read(rest).host == "0.0.0.0"
    assert found["HEALTHCHECK"].count("/health") == 1


def test_the_image_for_cpus_has_the_torch_that_is_tested() -> None:
    [version] = [rest for name, rest in instructions(DOCKERFILES[1]) if name == "ARG" and rest.startswith("TORCH=")]
    assert version == f"TORCH={PINNED['torch']}"


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_a_service_is_well_formed(name: str) -> None:
    service = COMPOSE["services"][name]
    assert set(service) <= SERVICE_KEYS and set(service["healthcheck"]) <= HEALTH_KEYS
    folder = ROOT / "deploy" / service["build"]["context"]
    assert (folder / service["build"]["dockerfile"]).resolve() in DOCKERFILES
    assert {volume.split(":")[0] for volume in service["volumes"]} <= set(COMPOSE["volumes"])
    assert all(port.startswith("127.0.0.1:") and port.endswith(":8000") for port in service["ports"])
    ours = {key: "x" for key in service["environment"] if key.startswith("SACCADE_")}
    assert set(environment(ours)) <= set(new_parser("serve").kinds)


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_a_service_gives_requests_time_to_finish(name: str) -> None:
    service = COMPOSE["services"][name]
    words = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in service["command"]]
    command, rest = find_command(words)
    flags = new_parser(command).read(rest)
    assert float(service["stop_grace_period"].rstrip("s")) > flags.shutdown_timeout_s
    assert "/health" in shlex.join(service["healthcheck"]["test"])

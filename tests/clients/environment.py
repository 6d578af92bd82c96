"""Separate environments for clients, made once from a file of pinned packages and kept in the user's cache.

`make clients` makes them ahead of time, even while the packages of the tests are still being installed.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from tests.kept_files import CACHE, make_once

INSTALL_TIMEOUT_S = 900
# Clients that import torch use the packages of the tests, on top of a few of their own.
SHARING = ("guidellm",)
OPTIONS = ("--quiet", "--no-deps", "--no-compile", "--no-input", "--disable-pip-version-check")


class CannotInstallError(Exception):
    pass


def interpreter_for(requirements: Path) -> Path:
    """The Python of an environment with exactly these packages; those of SHARING fall back on the packages of the
    tests. Raises CannotInstallError with pip's reason."""
    ours = sysconfig.get_path("purelib") if requirements.stem in SHARING else ""
    key = hashlib.sha256(requirements.read_bytes() + sys.version.encode() + ours.encode()).hexdigest()[:16]
    note = make_once(
        CACHE / "environments" / f"{requirements.stem}-{key}.txt", lambda part: _make(part, requirements, ours)
    )
    return Path(note.read_text()) / "bin" / "python"


def _make(note: Path, requirements: Path, ours: str) -> None:
    """Makes an environment, and writes its path to `note` once it is complete."""
    folder = note.with_name(f"{note.name.partition('.')[0]}-{os.getpid()}")
    venv.create(folder, with_pip=False, symlinks=True)
    if ours:
        [packages] = folder.glob("lib/python*/site-packages")
        (packages / "tests.pth").write_text(f"{ours}\n")
    command = (sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", *OPTIONS)
    try:
        done = subprocess.run(
            (*command, "--requirement", str(requirements)), capture_output=True, timeout=INSTALL_TIMEOUT_S, check=False
        )
        reason = done.stderr.decode(errors="replace")[-300:] if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    if reason:
        shutil.rmtree(folder, ignore_errors=True)
        raise CannotInstallError(f"the packages of {requirements.name} cannot be installed: {reason}")
    note.write_text(str(folder))


def main() -> int:
    for requirements in sorted(Path(__file__).parent.glob("*.txt")):
        try:
            interpreter_for(requirements)
        except CannotInstallError as error:
            sys.stderr.write(f"{error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

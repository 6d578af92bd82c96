"""Files that are made once and kept in the user's cache. Imports only the standard library."""

import os
from collections.abc import Callable
from pathlib import Path

CACHE = Path.home() / ".cache" / "saccade-tests"


def make_once(path: Path, write: Callable[[Path], None]) -> Path:
    """A cached file. It appears whole or not at all, because other processes may be making it too."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}")
        write(part)
        part.replace(path)
    return path


def write(path: Path, content: bytes | str) -> None:
    path.write_bytes(content.encode() if isinstance(content, str) else content)

"""Triton compiles its driver and a launcher for each kernel in C, which needs a C compiler and Python's headers. Many
machines with a GPU lack one of them."""

import importlib
import shutil
import sys
import sysconfig
from pathlib import Path

from saccade.config import c_compilers
from saccade.errors import ConfigError


def missing_tools() -> tuple[str, str]:
    """What is missing to compile C for this Python, and how to get it. Both are empty if nothing is."""
    if not any(map(shutil.which, c_compilers())):
        return "there is no C compiler", "install one (apt-get install gcc libc6-dev), or name it in CC"
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        return f"Python's headers are missing ({header})", f"install them (apt-get install {package})"
    return "", ""


def load_triton_driver() -> None:
    """Compiles it if Triton's cache does not have it."""
    try:
        importlib.import_module("triton.runtime").driver.active  # noqa: B018 - the property loads it
    except Exception as error:
        problem, fix = missing_tools()
        if not problem:
            raise
        raise ConfigError(f"Triton cannot compile its driver: {problem}; {fix}") from error

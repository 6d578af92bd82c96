"""Builds the stand-in for CUDA's libraries with g++ and the headers that torch's CUDA packages bring."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

SOURCES = Path(__file__).with_name("cuda")
FOLDER = Path(sys.prefix) / "standin"  # in the virtual environment, with the kernels that were compiled
LIBRARY = FOLDER / "libcuda.so.1"


class CannotBuildError(Exception):
    pass


def build() -> Path:
    """Returns the library, and builds it if a source is newer. It is loaded before all others, so that the runtime and
    cuBLAS are found in it, too."""
    if torch.version.cuda is None:
        raise CannotBuildError(
            f"torch {torch.__version__} in {sys.prefix} is a build for CPUs. The stand-in needs the build for CUDA; a "
            "link folder, an index or a constraint file (`pip config list`, PIP_ variables) can make pip take another."
        )
    sources = sorted(SOURCES.iterdir())
    if LIBRARY.exists() and LIBRARY.stat().st_mtime > max(one.stat().st_mtime for one in sources):
        return LIBRARY
    FOLDER.mkdir(exist_ok=True)
    part = FOLDER / f"part-{os.getpid()}"
    command = [
        *("g++", "-std=c++17", "-O1", "-Wall", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"),
        *(f"-I{folder}" for folder in _headers()),
        *(str(one) for one in sources if one.suffix == ".cpp"),
        *("-o", str(part), "-ldl"),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CannotBuildError(f"the stand-in needs g++ ({error})") from error
    if done.returncode:
        raise CannotBuildError(f"g++ cannot build the stand-in:\n{done.stderr}")
    part.replace(LIBRARY)
    link = FOLDER / "libcuda.so"  # the name that Triton links its launchers with
    link.unlink(missing_ok=True)
    link.symlink_to(LIBRARY.name)
    return LIBRARY


def _headers() -> list[Path]:
    """Of the runtime that torch uses, then Triton's for what they include from other packages."""
    found = [
        file.parent
        for package, pattern in (("nvidia", "*/include"), ("triton", "backends/nvidia/include"))
        for folder in _folders(package)
        for file in folder.glob(f"{pattern}/cuda_runtime_api.h")
    ]
    if len(found) < 2:
        raise CannotBuildError(f"{sys.prefix} lacks the headers of nvidia-cuda-runtime or triton, which torch brings")
    return found


def _folders(package: str) -> list[Path]:
    found = find_spec(package)
    return [Path(folder) for folder in found.submodule_search_locations or ()] if found else []

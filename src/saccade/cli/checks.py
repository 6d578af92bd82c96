"""Machine checks of `saccade doctor`. Each yields a finding; none raises."""

import importlib.util
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from saccade.config import kernel_folder
from saccade.errors import SaccadeError
from saccade.server.http.addresses import address_of

GIB = 2**30
TORCH_FROM, TORCH_BELOW = (2, 11), (2, 14)
MIN_PYTHON = (3, 11)
MIN_CAPABILITY = (8, 0)
ENOUGH_DISK_BYTES = 40 * GIB
ENOUGH_FILES = 4096
WRITABLE_HUB = "set HF_HOME to a writable folder"
# Optional modules: what they are for, and the extra that installs them.
OPTIONAL = {
    "flash_attn": ("the fastest attention on Hopper and later", "cuda"),
    "quack": ("faster matrix products on Hopper", "cuda"),
    "av": ("video files (lists of frames work without it)", "video"),
    "gguf": ("GGUF checkpoints", "gguf"),
    "matplotlib": ("plots of benchmarks", "plot"),
}


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"  # works, but could be better
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found and, if something is wrong, how to fix it."""

    check: str
    level: Level
    found: str
    fix: str = ""


Check = Callable[[], Finding]


def guarded(name: str, check: Check, fix: str) -> Finding:
    try:
        return check()
    except SaccadeError as error:
        return Finding(name, Level.BROKEN, str(error), fix)
    except Exception as error:
        return Finding(name, Level.BROKEN, f"{type(error).__name__}: {error}", fix)


def check_machine(host: str, port: int) -> Iterator[Finding]:
    yield check_python()
    yield guarded("torch", check_torch, 'install it: pip install "torch>=2.11,<2.14"')
    yield guarded("gpu", check_gpu, "check that nvidia-smi works")
    yield guarded("gpus", check_gpus, "check that nvidia-smi works")
    yield guarded("kernels", check_kernels, "reinstall saccade-vlm[cuda] and triton")
    yield check_compiler()
    for module, (what, extra) in OPTIONAL.items():
        yield check_optional(module, what, extra)
    yield guarded("disk", check_disk, WRITABLE_HUB)
    yield check_cache()
    yield check_files()
    yield guarded("port", lambda: check_port(host, port), "choose another with --port")


def check_python() -> Finding:
    found = f"{platform.python_version()} on {platform.platform(terse=True)}"
    if sys.version_info[:2] < MIN_PYTHON:
        return Finding("python", Level.BROKEN, found, "use Python 3.11 or later")
    return Finding("python", Level.OK, found)


def check_torch() -> Finding:
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    found = f"{torch.__version__} ({build})"
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if not TORCH_FROM <= version < TORCH_BELOW:
        return Finding("torch", Level.BROKEN, found, 'install a tested version: pip install "torch>=2.11,<2.14"')
    if torch.version.cuda is None and nvidia_gpus():
        fix = "this machine has an NVIDIA GPU: install a torch wheel for CUDA (pytorch.org/get-started)"
        return Finding("torch", Level.BROKEN, found, fix)
    return Finding("torch", Level.OK, found)


def check_gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        seen = nvidia_gpus()
        if seen:
            fix = "torch cannot use it: update the driver, or install a torch wheel for an older CUDA"
            return Finding("gpu", Level.BROKEN, "; ".join(seen), fix)
        return Finding("gpu", Level.NOTE, "none; models run on the CPU, with recorded graphs", "fine for small models")
    free, total = torch.cuda.mem_get_info()
    major, minor = torch.cuda.get_device_capability()
    found = (
        f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}, {free / GIB:.1f} of {total / GIB:.1f} "
        f"GiB free, {'; '.join(nvidia_gpus()) or 'driver unknown'}"
    )
    if (major, minor) < MIN_CAPABILITY:
        return Finding("gpu", Level.BROKEN, found, "bfloat16 kernels need compute capability 8.0 (Ampere) or later")
    if free < 0.8 * total:
        return Finding(
            "gpu", Level.NOTE, found, "other processes use GPU memory: stop them, or lower --gpu-memory-utilization"
        )
    return Finding("gpu", Level.OK, found)


def check_gpus() -> Finding:
    """Checks whether GPUs can read each other's memory."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        found = "1: no tensor parallelism" if count else "0: tensor-parallel ranks run on the CPU"
        return Finding("gpus", Level.OK, found)
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    apart = [(a, b) for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    if not apart:
        return Finding("gpus", Level.OK, f"{count}: each can read the others' memory (symmetric memory)")
    first, second = apart[0]
    found = f"{count}: GPU {first} cannot read the memory of GPU {second} ({len(apart)} of {len(pairs)} pairs)"
    fix = "ranks on these use NCCL; set CUDA_VISIBLE_DEVICES to GPUs that can, for example those with NVLink"
    return Finding("gpus", Level.NOTE, found, fix)


def check_kernels() -> Finding:
    import torch

    from saccade.kernels.dispatch import kernels_for

    is_cuda = torch.cuda.is_available()
    kernels = kernels_for("cuda" if is_cuda else "cpu", torch.bfloat16 if is_cuda else torch.float32)
    chosen = {name: f"{home}: {reason}" for name, home, reason in kernels.describe() if name.endswith("attention")}
    found = f"{kernels.name}; " + "; ".join(f"{name} by {text}" for name, text in chosen.items())
    if is_cuda and "flash" not in kernels.name and torch.cuda.get_device_capability() >= (9, 0):
        return Finding("kernels", Level.NOTE, found, 'this GPU can do better: pip install "saccade-vlm[cuda]"')
    return Finding("kernels", Level.OK, found)


def check_compiler() -> Finding:
    """Checks that Triton could compile what it compiles in C, which only a GPU needs."""
    from saccade.kernels.toolchain import missing_tools

    problem, fix = missing_tools()
    if problem and nvidia_gpus():
        return Finding("compiler", Level.BROKEN, f"{problem}, and Triton compiles kernels' launchers in C", fix)
    return Finding("compiler", Level.OK, "not needed without an NVIDIA GPU" if problem else "C can be compiled")


def check_optional(module: str, what: str, extra: str) -> Finding:
    if importlib.util.find_spec(module) is not None:
        return Finding(module, Level.OK, "installed")
    if extra == "cuda" and not nvidia_gpus():
        return Finding(module, Level.OK, "not installed, and not needed without an NVIDIA GPU")
    return Finding(module, Level.NOTE, f"not installed; needed for {what}", f'pip install "saccade-vlm[{extra}]"')


def check_disk() -> Finding:
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE)
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(place).free
    found = f"{free / GIB:.0f} GiB free for downloaded models at {folder}"
    if not os.access(place, os.W_OK | os.X_OK):
        return Finding("disk", Level.NOTE, f"{found}, which this user cannot write to", WRITABLE_HUB)
    if free < ENOUGH_DISK_BYTES:
        return Finding("disk", Level.NOTE, found, "a model of 8 B parameters takes 17 GiB; set HF_HOME to another disk")
    return Finding("disk", Level.OK, found)


def check_cache() -> Finding:
    """Checks the folder where compiled kernels are kept between starts."""
    folder = kernel_folder()
    if folder is None or not os.access(folder, os.W_OK | os.X_OK):
        found = "this user has no writable folder for compiled kernels: every start on a GPU compiles them again"
        return Finding("cache", Level.NOTE, found, "set XDG_CACHE_HOME to a writable folder")
    return Finding("cache", Level.OK, f"compiled kernels are kept in {folder}")


def check_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} open files allowed (ulimit -n), hard limit {hard}"
    if soft < ENOUGH_FILES:
        return Finding("files", Level.NOTE, found, f"every connection needs one: ulimit -n {ENOUGH_FILES}")
    return Finding("files", Level.OK, found)


def check_port(host: str, port: int) -> Finding:
    try:
        family, address = address_of(host, port)
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        found = f"{host}:{port} cannot be bound: {error.strerror or error}"
        return Finding("port", Level.BROKEN, found, "choose another with --port, or stop the process that uses it")
    return Finding("port", Level.OK, f"{host}:{port} is free")


def nvidia_gpus() -> list[str]:
    """Name, driver version and memory of each GPU, from nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = ["--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done: Any = subprocess.run([program, *query], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [f"driver: {line.strip()}" for line in done.stdout.splitlines()] if done.returncode == 0 else []

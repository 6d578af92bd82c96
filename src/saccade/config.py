"""Settings: frozen, keyword-only, checked once. Facts found at run time live in other types."""

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any

from saccade.errors import ConfigError


def setting(default: Any, help: str) -> Any:
    """A field that is also a command-line flag of the same name and type."""
    return field(default=default, metadata={"help": help})


def flag_of(name: str) -> str:
    """`--max-model-len` for `max_model_len`."""
    return f"--{name.replace('_', '-')}"


def refused(name: str, value: object, allowed: str) -> ConfigError:
    """The error for a setting whose value is not allowed."""
    return ConfigError(f"{name} is {value}; {allowed} ({flag_of(name)})")


_KINDS: dict[Any, tuple[Any, str]] = {
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "text"),
    bool: (bool, "True or False"),
}


def check_types(settings: Any) -> None:
    """For values that no command line has parsed."""
    for each in fields(settings):
        value, (allowed, words) = getattr(settings, each.name), _KINDS[each.type]
        if not isinstance(value, allowed) or (isinstance(value, bool) and each.type is not bool):
            raise refused(each.name, repr(value), f"it must be {words}")


def check_at_least(settings: Any, lowest: Mapping[str, float]) -> None:
    for name, low in lowest.items():
        if not (value := getattr(settings, name)) >= low:
            raise refused(name, value, f"it must be at least {low}")


def check_not_negative(settings: Any, *names: str) -> None:
    for name in names:
        if not (value := getattr(settings, name)) >= 0:
            raise refused(name, value, "it must be 0 or more")


def check_above_zero(settings: Any, *names: str) -> None:
    for name in names:
        if not (value := getattr(settings, name)) > 0:
            raise refused(name, value, "it must be above 0")


Word = Annotated[str, "has no comma"]
"""An item of a list that may be written with commas (`tuple[Word, ...]`). Lists of plain `str` keep their commas."""

ENVIRONMENT_PREFIX = "SACCADE_"


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Settings by field name, from non-empty SACCADE_ variables. No other module touches the environment."""
    found = os.environ if variables is None else variables
    prefix = ENVIRONMENT_PREFIX
    return {name.removeprefix(prefix).lower(): text for name, text in found.items() if name.startswith(prefix) and text}


FOREIGN_PREFIXES = ("SGLANG_", "VLLM_")


def foreign_variables(variables: Mapping[str, str] | None = None) -> list[str]:
    """Sorted names of the variables of other engines that are set."""
    found = os.environ if variables is None else variables
    return sorted(name for name, text in found.items() if name.startswith(FOREIGN_PREFIXES) and text)


def openai_api_key(variables: Mapping[str, str] | None = None) -> str:
    return (os.environ if variables is None else variables).get("OPENAI_API_KEY", "")


def check_sent_key(key: str, flag: str) -> None:
    """Refuses a key that an HTTP header cannot carry, such as one with a line break at its end."""
    if any(not char.isprintable() or ord(char) > 0xFF for char in key):  # headers are Latin-1
        raise ConfigError(f"the key has characters that an HTTP header cannot carry ({flag})")


TRITON_CACHE = "TRITON_CACHE_DIR"
KERNEL_CACHES = ("QUACK_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", TRITON_CACHE)
KEEPS_ATTENTION = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
NO_BYTECODE, BYTECODE_FOLDER = "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"


def kernel_folder() -> Path | None:
    return _private_folder("kernels")


def use_private_kernel_cache() -> None:
    """Cache compiled kernels, which are loaded as code, in a folder private to this user. By default the packages use a
    well-known name in the shared temporary folder, or compile at every start. Call this before importing them."""
    if (folder := kernel_folder()) is not None:  # else they recompile
        for name in KERNEL_CACHES:
            os.environ.setdefault(name, str(folder))
        os.environ.setdefault(KEEPS_ATTENTION, "1")
    if not _is_there(os.environ.get(TRITON_CACHE)):  # Triton compiles nothing without a folder
        try:
            os.environ[TRITON_CACHE] = tempfile.mkdtemp(prefix="saccade-kernels-")
        except OSError:
            raise ConfigError(
                f"kernels are compiled into a folder, and none can be written (TMPDIR, {TRITON_CACHE})"
            ) from None
        atexit.register(shutil.rmtree, os.environ[TRITON_CACHE], ignore_errors=True)


def _is_there(folder: str | None) -> bool:
    """Whether a folder exists, or could be created. One with kernels may be read-only."""
    try:
        Path(folder or "").mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return bool(folder)


def c_compilers() -> tuple[str, ...]:
    """The programs that Triton compiles C with: the first that is there, or the one that CC names."""
    return (named,) if (named := os.environ.get("CC")) is not None else ("gcc", "clang")


def worker_environment() -> dict[str, str]:
    """Environment of a worker process. Where Python may not write bytecode next to sources, as in many container
    images, the worker uses its own bytecode cache: compiling every import costs seconds per start."""
    found = dict(os.environ)
    if found.get(NO_BYTECODE) and (folder := _private_folder("bytecode")) is not None:
        del found[NO_BYTECODE]
        found.setdefault(BYTECODE_FOLDER, str(folder))
    return found


_JOB_VARIABLES = ("PATH", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")


def job_environment() -> dict[str, str]:
    """Environment of a process that handles untrusted data: no secrets, one thread, little address space."""
    found = worker_environment()
    kept = {name: text for name, text in found.items() if name in _JOB_VARIABLES or name.startswith("PYTHON")}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return kept | threads | {"MALLOC_ARENA_MAX": "2"}


LOOPBACK, SHARED_GPU = "GLOO_SOCKET_IFNAME", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


def use_loopback() -> None:
    """Make ranks of one machine talk over loopback unless the user names another interface. This needs no network and
    is not reachable from outside."""
    os.environ.setdefault(LOOPBACK, "lo" if sys.platform == "linux" else "lo0")


def allows_shared_gpu() -> bool:
    """Whether several ranks may share one GPU (a variable of torch). For tests: the ranks then take turns."""
    return os.environ.get(SHARED_GPU, "") == "1"


def history_file() -> Path | None:
    """Where `saccade run` keeps the questions of past sessions."""
    folder = _private_folder("run")
    return None if folder is None else folder / "history"


def shadow_folder() -> Path | None:
    """Default folder for the inputs of replays that were wrong."""
    return _private_folder("shadow")


def writable_folder(named: str, flag: str) -> Path:
    """The folder that the user named with `flag`, created if it does not exist."""
    try:
        folder = Path(named).expanduser()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"{named} is not a folder ({flag})") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: no such user as in ~name
        raise ConfigError(f"{named} cannot be created: {getattr(error, 'strerror', None) or error} ({flag})") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{named} cannot be written to by this user ({flag})")
    return folder


def _private_folder(name: str) -> Path | None:
    """A folder that only this user can read and that persists between starts; None if it cannot be created."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "saccade", name)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: a user without a home, as containers may have
        return None
    return folder


class Mode(StrEnum):
    """How a body is captured: as one graph, or in pieces with calls between them."""

    FULL = "full"
    PIECEWISE = "piecewise"


class Tier(StrEnum):
    EXACT = "exact"  # a graph of exactly this structure, without padding
    CAPACITY = "capacity"  # a bucket's graph: boundaries are data, rows are padded
    EAGER = "eager"  # no graph, with a reason


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphSettings:
    """What a graph runner may do. Without any tier, everything runs eagerly."""

    mode: Mode = Mode.FULL
    tiers: frozenset[Tier] = frozenset({Tier.CAPACITY})
    strict: bool = False  # a fallback is an error
    exact_after: int = 3  # batches of one structure before it gets its own graph
    exact_max_graphs: int = 32
    exact_max_bytes: int = 2 * 2**30

    def __post_init__(self) -> None:
        if Tier.EAGER in self.tiers:
            raise ConfigError("eager is the fallback when no graph fits; it is not a tier to enable")
        for name in ("exact_after", "exact_max_graphs", "exact_max_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")

"""The file of a replay that was found wrong: its inputs and all that it read, for `saccade replay`.

A safetensors file, so that reading it runs no code; its metadata is JSON.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from saccade import __version__
from saccade.config import Mode
from saccade.errors import ConfigError
from saccade.execution.shadow_passes import PassArrays, cached_keys, context_slots, source_rows
from saccade.execution.state import DeviceState
from saccade.graphs import Capacity, GraphKey
from saccade.graphs.compare import Tensors
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings

FORMAT = "saccade shadow 1"
SUFFIX = ".shadow.safetensors"
MAX_FILES = 4  # of some hundred megabytes each at most
MAX_CONTEXT_BYTES = 256 * 2**20  # of keys and values: a longer context is left out


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The engine that writes files: what is needed to build it again, and where files go (None: nowhere)."""

    model: str
    settings: EngineSettings
    limits: SchedulerSettings
    folder: Path | None


@dataclass(frozen=True, kw_only=True)
class Kept:
    """One replay: its inputs, what it read, what it gave, and what an eager run gave."""

    key: GraphKey
    arrays: PassArrays
    inputs: Tensors
    reads: Tensors
    replayed: Tensors
    eager: Tensors
    most_bytes: int  # of one result (see `results_of`)

    @cached_property
    def digest(self) -> str:
        """Of all inputs."""
        return digest_of({**_tensors(self.arrays), **self.inputs, **self.reads})


@dataclass(frozen=True, kw_only=True)
class ShadowFile:
    """A file that was read. The caches' rows are empty where the context was too long to be kept."""

    origin: Origin
    kept: Kept
    digest: str
    cached: Tensors
    versions: Mapping[str, str]


def digest_of(tensors: Tensors) -> str:
    """Names, types, shapes and bits."""
    state = blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        state.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def write_file(origin: Origin, state: DeviceState, kept: Kept) -> Path | None:
    """The file's path; None where it could not be written. The oldest files make room."""
    if origin.folder is None:
        return None
    path = origin.folder / f"{kept.key.phase}-{kept.digest}{SUFFIX}"
    try:
        origin.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        files = sorted(origin.folder.glob(f"*{SUFFIX}"), key=lambda file: file.stat().st_mtime)
        for old in files[: max(0, len(files) - MAX_FILES + 1)]:
            old.unlink()
        save_file(dict(_named(state, kept)), path, _metadata(origin, kept))
        path.chmod(0o600)
    except (OSError, SafetensorError):  # no room, or not allowed: the report goes on without
        return None
    return path


def read_file(path: Path) -> ShadowFile:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ConfigError(f"{path} was not written by a shadow check of this version of Saccade")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return _parsed(tensors, {name: json.loads(text) for name, text in metadata.items() if name != "format"})
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is not a file of a shadow check, or is broken: {error}") from None


def _named(state: DeviceState, kept: Kept) -> Iterator[tuple[str, Tensor]]:
    groups = {
        "array": _tensors(kept.arrays),
        "input": kept.inputs,
        "read": kept.reads,
        "replayed": kept.replayed,
        "eager": kept.eager,
        "cached": _context(state, kept.arrays),
    }
    for group, tensors in groups.items():
        for name, tensor in tensors.items():
            yield f"{group}/{name}", tensor.detach().cpu().contiguous().clone()


def _context(state: DeviceState, arrays: PassArrays) -> dict[str, Tensor]:
    """Keys, values and rows of images that a pass reads, with their places, if they are not too many."""
    found: dict[str, Tensor] = {}
    if "sources" in arrays and state.vision_rows is not None:
        rows = torch.from_numpy(source_rows(arrays).astype(np.int64))
        found |= {"rows": rows, "vision rows": state.vision_rows.index_select(1, rows.to(state.vision_rows.device))}
    if "block_tables" in arrays:
        slots = context_slots(arrays, state.block_size)
        row_bytes = sum(part[0, 0].nbytes for pair in state.caches for part in pair)
        if len(slots) * row_bytes <= MAX_CONTEXT_BYTES:
            found |= {"slots": torch.from_numpy(slots.astype(np.int64)), **cached_keys(state, slots)}
    return found


def _metadata(origin: Origin, kept: Kept) -> dict[str, str]:
    key = kept.key
    data = {
        "model": origin.model,
        "settings": asdict(origin.settings),
        "limits": asdict(origin.limits),
        "key": {"phase": key.phase, "mode": key.mode.value, "capacity": dict(key.capacity), "digest": key.digest},
        "digest": kept.digest,
        "most_bytes": kept.most_bytes,
        "versions": {"saccade": __version__, "torch": torch.__version__, "device": _device_name(kept)},
    }
    return {"format": FORMAT} | {name: json.dumps(value) for name, value in data.items()}


def _device_name(kept: Kept) -> str:
    device = next(iter(kept.replayed.values())).device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _parsed(tensors: Tensors, data: dict[str, Any]) -> ShadowFile:
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        group, _, own = name.partition("/")
        groups.setdefault(group, {})[own] = tensor
    key = data["key"]
    kept = Kept(
        key=GraphKey(key["phase"], Mode(key["mode"]), Capacity.of(key["capacity"]), key["digest"]),
        arrays={name: tensor.numpy() for name, tensor in groups.get("array", {}).items()},
        inputs=groups.get("input", {}),
        reads=groups.get("read", {}),
        replayed=groups.get("replayed", {}),
        eager=groups.get("eager", {}),
        most_bytes=int(data["most_bytes"]),
    )
    origin = Origin(
        model=str(data["model"]),
        settings=_settings(EngineSettings, data["settings"]),
        limits=_settings(SchedulerSettings, data["limits"]),
        folder=None,
    )
    return ShadowFile(
        origin=origin, kept=kept, digest=data["digest"], cached=groups.get("cached", {}), versions=data["versions"]
    )


def _settings(kind: Any, data: Mapping[str, Any]) -> Any:
    """Those that this version knows; others have their defaults."""
    known = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in data.items() if name in known})


def _tensors(arrays: PassArrays) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}

"""The file of a wrong replay: its inputs and everything it read, for `saccade replay`. It is a safetensors file with
JSON metadata, so reading it runs no code. Each of several ranks writes its own part, with its number in the name."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from saccade import __version__
from saccade.config import Mode
from saccade.errors import ConfigError, GraphError
from saccade.execution.executor import DeviceExecutor
from saccade.execution.shadow_passes import (
    PassArrays,
    cached_keys,
    context_slots,
    put_back,
    results_of,
    run_eagerly,
    source_rows,
    written_keys,
)
from saccade.execution.state import DeviceState
from saccade.graphs import Batch, Capacity, GraphKey, GraphRunner
from saccade.graphs.compare import OutputDifference, Tensors, bit_differences
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings

FORMAT = "saccade shadow 1"
SUFFIX = ".shadow.safetensors"
MAX_FILES = 4  # of up to a few hundred megabytes each
GROUPS = {"input": "inputs", "read": "reads", "cached": "cached", "replayed": "replayed", "eager": "eager"}
MAX_CONTEXT_BYTES = 256 * 2**20  # keys and values of longer contexts are left out


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What is needed to rebuild the engine that wrote a file. Without a `folder`, no files are written."""

    model: str
    settings: EngineSettings
    limits: SchedulerSettings
    folder: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowFile:
    """A replay: its inputs, what it read from caches (`cached`) and from memory that the next step overwrites
    (`reads`), its results, and those of an eager run. Keys and values of very long contexts are left out."""

    origin: Origin
    rank: int = 0
    key: GraphKey
    arrays: PassArrays
    inputs: Tensors
    reads: Tensors
    cached: Tensors
    replayed: Tensors
    eager: Tensors
    most_bytes: int  # per result, see `results_of`
    digest: str  # of all inputs; all ranks use rank 0's
    versions: Mapping[str, str]

    @property
    def suffix(self) -> str:
        return SUFFIX if self.origin.settings.tensor_parallel_size == 1 else f".rank{self.rank}{SUFFIX}"


def digest_of(tensors: Tensors, arrays: PassArrays | None = None) -> str:
    """Digest of names, types, shapes and bits."""
    state = blake2b(digest_size=16)
    for name, tensor in sorted({**_tensors(arrays or {}), **tensors}.items()):
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        state.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def current_versions(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"saccade": __version__, "torch": str(torch.__version__), "device": name}


def context_of(state: DeviceState, arrays: PassArrays) -> dict[str, Tensor]:
    """Image rows that a pass reads, and its keys and values unless there are too many, with their places."""
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


def write_file(folder: Path, file: ShadowFile) -> Path:
    """Returns the file's path. Deletes the oldest files beyond the limit."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{file.key.phase}-{file.digest}{file.suffix}"
    files = [found for found in folder.glob(f"*{SUFFIX}") if "".join(found.suffixes) == file.suffix]
    files.sort(key=lambda found: found.stat().st_mtime)
    for old in files[: max(0, len(files) - MAX_FILES + 1)]:
        old.unlink(missing_ok=True)
    groups = {"array": _tensors(file.arrays)} | {name: getattr(file, field) for name, field in GROUPS.items()}
    tensors = {
        f"{group}/{name}": tensor.detach().cpu().contiguous().clone()
        for group, named in groups.items()
        for name, tensor in named.items()
    }
    path.touch(mode=0o600)  # it holds users' prompts and images
    try:
        save_file(tensors, path, _metadata(file))
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


def file_of_rank(path: Path, rank: int) -> Path:
    """The part of another rank, beside the file of one."""
    return path.with_name(re.sub(rf"\.rank\d+({re.escape(SUFFIX)})$", rf".rank{rank}\1", path.name))


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


def _metadata(file: ShadowFile) -> dict[str, str]:
    key, origin = file.key, file.origin
    data = {
        "model": origin.model,
        "rank": file.rank,
        "settings": origin.settings,
        "limits": origin.limits,
        "key": {"phase": key.phase, "mode": key.mode, "capacity": dict(key.capacity), "digest": key.digest},
        "digest": file.digest,
        "most_bytes": file.most_bytes,
        "versions": file.versions,
    }
    return {"format": FORMAT} | {name: msgspec.json.encode(value).decode() for name, value in data.items()}


def _parsed(tensors: Tensors, data: dict[str, Any]) -> ShadowFile:
    """Unknown settings are ignored; missing ones get their defaults."""
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        group, _, own = name.partition("/")
        groups.setdefault(group, {})[own] = tensor
    key = data["key"]
    origin = Origin(
        model=str(data["model"]),
        settings=msgspec.convert(data["settings"], EngineSettings),
        limits=msgspec.convert(data["limits"], SchedulerSettings),
        folder=None,
    )
    return ShadowFile(
        origin=origin,
        rank=int(data.get("rank", 0)),
        key=GraphKey(key["phase"], Mode(key["mode"]), Capacity.of(key["capacity"]), key["digest"]),
        arrays={name: tensor.numpy() for name, tensor in groups.get("array", {}).items()},
        most_bytes=int(data["most_bytes"]),
        digest=data["digest"],
        versions=data["versions"],
        **{field: groups.get(name, {}) for name, field in GROUPS.items()},
    )


def _tensors(arrays: PassArrays) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Digests of the results of a new replay and a new eager run, and where the results differ."""

    replay_digest: str
    eager_digest: str
    differences: list[OutputDifference]
    as_recorded: list[OutputDifference]  # where the new replay differs from the one in the file


def replay_file(executor: DeviceExecutor, file: ShadowFile) -> Replayed:
    """Replays the pass and runs it eagerly, each from the file's state. Overwrites caches, so nothing else may run."""
    runner, batch = _find(executor, file)
    state = executor.state
    _check_fits(state, runner, file)
    with torch.no_grad():
        _restore(state, runner, file)
        replay = runner.replay(file.key, batch, lambda outputs: _results(state, runner, file, outputs))
        _restore(state, runner, file)
        values = {**batch.tensors, **batch.arrays}
        eager = run_eagerly(runner, values, lambda outputs: _results(state, runner, file, outputs), like=file.key)
    recorded = {name: file.replayed[name].to(tensor.device) for name, tensor in replay.items()}
    return Replayed(
        replay_digest=digest_of(replay),
        eager_digest=digest_of(eager),
        differences=bit_differences(replay, eager),
        as_recorded=bit_differences(replay, recorded),
    )


def _find(executor: DeviceExecutor, file: ShadowFile) -> tuple[GraphRunner, Batch]:
    runners = {runner.phase.name: runner for runner in executor.phases}
    runner = runners.get(file.key.phase)
    if runner is None:
        raise ConfigError(f"the file is of a {file.key.phase} pass; this model has {', '.join(runners)}")
    device = runner.phase.arena.device
    values = {**{name: tensor.to(device) for name, tensor in file.inputs.items()}, **file.arrays}
    try:
        batch = runner.phase.arena.admit(values)
    except GraphError as error:
        raise ConfigError(f"the file is of another model, or of an engine with other limits: {error}") from None
    if file.key.digest:
        runner.catalogue.costs = None  # capture the graph even if another way is faster
        runner.capture_exact(values)
    if file.key not in {graph.key for graph in runner.graphs}:
        raise ConfigError(
            f"an engine with the settings of the file has no graph [{file.key}]: the file is of another model, or of "
            "another version of Saccade"
        )
    return runner, batch


def _check_fits(state: DeviceState, runner: GraphRunner, file: ShadowFile) -> None:
    """Raises a ConfigError if this engine could not have written the file."""
    try:
        needed = runner.phase.volatile_in(file.arrays) | context_of(state, file.arrays)
        known = {**file.reads, **file.cached}
        wrong = [name for name, tensor in needed.items() if not _is_like(tensor, known[name])]
    except (KeyError, IndexError, RuntimeError) as error:
        wrong = [str(error).partition("\n")[0]]
    if wrong:
        raise ConfigError(f"the file is of another model, or of an engine with other limits: {wrong[0]}")


def _is_like(tensor: Tensor, other: Tensor) -> bool:
    return tensor.dtype == other.dtype and tensor.shape == other.shape


def _restore(state: DeviceState, runner: GraphRunner, file: ShadowFile) -> None:
    """Puts everything the pass read back in place."""
    device, cached = state.newest_ids.device, file.cached
    put_back(runner.phase, file.arrays, {name: tensor.to(device) for name, tensor in file.reads.items()})
    if "rows" in cached and state.vision_rows is not None:
        state.vision_rows.index_copy_(1, cached["rows"].to(device), cached["vision rows"].to(device))
    if "slots" in cached:
        slots = cached["slots"].to(device)
        for layer, (keys, values) in enumerate(state.caches):
            keys.flatten(0, 1).index_copy_(0, slots, cached[f"keys of layer {layer}"].to(device))
            values.flatten(0, 1).index_copy_(0, slots, cached[f"values of layer {layer}"].to(device))


def _results(state: DeviceState, runner: GraphRunner, file: ShadowFile, outputs: Tensors) -> dict[str, Tensor]:
    found = results_of(runner.phase, file.arrays, outputs, file.most_bytes)
    found |= written_keys(state, file.arrays, file.most_bytes)
    return {name: view.clone() for name, view in found.items()}

"""Streams named tensors from the safetensors files of a folder."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from saccade.errors import ConfigError
from saccade.models.model_config import MERGE_ADAPTER
from saccade.models.read_ahead import ReadAhead

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Checkpoint(Protocol):
    """Named tensors in disk order. Error messages call the checkpoint `where`."""

    @property
    def where(self) -> str: ...

    @property
    def total_bytes(self) -> int: ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]: ...


@dataclass(frozen=True, slots=True)
class SafetensorsFolder:
    """One or several .safetensors files, memory-mapped: a rank copies its own data only. Together the ranks read the
    files ahead, each its `share`, so that every byte is fetched once. As in transformers, model.safetensors takes
    precedence over an index, and files that the index does not name are ignored. Without either, all files are used,
    and no two may hold the same tensor."""

    folder: Path
    files: tuple[Path, ...]
    share: tuple[int, int] = (0, 1)  # rank and number of ranks

    @classmethod
    def open(cls, folder: Path, share: tuple[int, int] = (0, 1)) -> "SafetensorsFolder":
        whole, index = folder / WHOLE, folder / INDEX
        if whole.is_file():
            return cls(folder, (whole,), share)
        if index.is_file():
            return cls(folder, _indexed_files(index), share)
        files = tuple(sorted(folder.glob("*.safetensors")))
        if [file.name for file in files] == ["adapter_model.safetensors"]:
            raise ConfigError(f"{folder} has no weights but {files[0].name}; {MERGE_ADAPTER}")
        if files:
            return cls(folder, files, share)
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
            raise ConfigError(
                f"{folder} has only pickled weights, which are never loaded because unpickling runs code; "
                f"convert them to .safetensors or choose a revision that has them"
            )
        raise ConfigError(
            f"{folder} has no .safetensors files; download the weights, or use --load-format dummy for random ones"
        )

    @property
    def where(self) -> str:
        return str(self.folder)

    @property
    def total_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        homes: dict[str, Path] = {}
        position = 0
        with ReadAhead(self.files, *self.share) as ahead:
            for file in self.files:
                for name, tensor in _tensors_of(file):
                    if homes.setdefault(name, file) != file:
                        raise ConfigError(
                            f"{self.folder}: both {homes[name].name} and {file.name} hold {name}; "
                            f"keep the files of one checkpoint only"
                        )
                    yield name, tensor
                    position += tensor.nbytes
                    ahead.reach(position)


def _tensors_of(file: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.offset_keys():
                yield name, opened.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); download it again") from error


def _indexed_files(index: Path) -> tuple[Path, ...]:
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ConfigError(f"{index} is not a safetensors index ({error!r}); download it again") from error
    files = tuple(index.parent / name for name in names)
    for file in files:
        if file.parent != index.parent:
            raise ConfigError(f"{index} names {file.name} outside its folder; download the checkpoint again")
        if not _is_file(file):
            raise ConfigError(
                f"{file} is missing, but {index.name} names it as one of {len(files)} shards; download it again"
            )
    return files


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # not a valid file name
        return False

"""A fuzzer for files of weights: headers of GGUF and safetensors, and the index of several files.

Case i of a seed is always the same file: `python -m tests.models.fuzz_checkpoints --seed 7 --only 1234` repeats one,
and `--minutes 30` runs new ones for that time. A file must give tensors or a ConfigError that names it.
"""

import json
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import gguf
import numpy as np
import torch
from safetensors.torch import save

from saccade.errors import ConfigError
from saccade.models.checkpoint import INDEX, SafetensorsFolder
from saccade.models.gguf import GGUFFile
from tests.fuzzing import fuzz, fuzz_reader

MAX_CPU_S = 5.0  # for files of a few kilobytes, which take milliseconds
NUMBERS = (0, 1, 2, 7, 8, 9, 255, 2**16, 2**31 - 1, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)


class FoundError(AssertionError):
    """A file that neither loaded nor was refused."""


@dataclass(frozen=True, slots=True)
class FileCase:
    seed: int
    index: int
    name: str
    data: bytes


def corpus(folder: Path) -> dict[str, bytes]:
    """A small file of every kind, by file name."""
    path = folder / "whole.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_context_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "c"])
    writer.add_array("tokenizer.ggml.token_type", [1, 2, 3])
    for name, shape in {"token_embd.weight": (4, 8), "blk.0.attn_q.weight": (8, 8), "output_norm.weight": (8,)}.items():
        writer.add_tensor(name, np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    index = {"metadata": {}, "weight_map": {"a": "part-1.safetensors", "b": "part-1.safetensors"}}
    tensors = {"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}
    return {
        "model.gguf": path.read_bytes(),
        "model.safetensors": save(tensors),
        INDEX: json.dumps(index).encode(),
    }


def make_case(seed: int, index: int, files: dict[str, bytes]) -> FileCase:
    random = Random(f"{seed}:{index}")
    name = random.choice(sorted(files))
    data = bytearray(files[name])
    for _ in range(random.choice((0, 1, 1, 2, 5))):
        at = random.randrange(max(1, min(len(data), random.choice((32, 400, len(data) + 1)))))
        match random.randrange(5):
            case 0 if data:
                data[at % len(data)] ^= 1 << random.randrange(8)
            case 1:
                size = random.choice(("<I", "<Q"))
                number = random.choice(NUMBERS) % (2**32 if size == "<I" else 2**64)
                data[at : at + struct.calcsize(size)] = struct.pack(size, number)
            case 2:
                del data[at:]
            case 3:
                del data[at : at + random.choice((1, 4, 8, 40))]
            case _:
                data[at:at] = random.choice((bytes(data[at : at + 40]), b"[" * 2000, b"../", b"null", b"\xff\xfe"))
    return FileCase(seed, index, name, bytes(data))


def check(case: FileCase, folder: Path) -> None:
    for old in folder.iterdir():
        old.unlink()
    path = folder / case.name
    path.write_bytes(case.data)
    (folder / "part-1.safetensors").write_bytes(save({"a": torch.ones(1)}))
    begun = time.thread_time()
    try:
        if case.name.endswith(".gguf"):
            file = GGUFFile.open(path)
            file.config()
            found = list(file.tensors())
        else:
            found = list(SafetensorsFolder.open(folder).tensors())
        if sum(tensor.numel() for _, tensor in found) > 64 * (len(case.data) + 1000):
            raise FoundError("tensors are larger than their file")
    except ConfigError as error:
        if str(folder) not in str(error):
            raise FoundError(f"the file is not named: {error}") from error
    except FoundError:
        raise
    except BaseException as error:
        raise FoundError(f"{type(error).__name__}: {error}"[:300]) from error
    if (used := time.thread_time() - begun) > MAX_CPU_S:
        raise FoundError(f"{used:.1f} seconds of CPU time")


def run_cases(seed: int, indices: Iterator[int]) -> Iterator[tuple[FileCase, FoundError | None]]:
    with tempfile.TemporaryDirectory() as made, tempfile.TemporaryDirectory() as folder:
        files = corpus(Path(made))
        for index in indices:
            case = make_case(seed, index, files)
            try:
                check(case, Path(folder))
            except FoundError as error:
                yield case, error
            else:
                yield case, None


def main() -> int:
    return fuzz(fuzz_reader(__doc__).parse_args(), run_cases)


if __name__ == "__main__":
    sys.exit(main())

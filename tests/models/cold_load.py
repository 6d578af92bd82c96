"""What reading ahead brings to a first start: `python -m tests.models.cold_load [FOLDER]`.

Reads the tensors of a checkpoint folder, or of a made-up one (`--gigabytes`), into memory, with and without readers
ahead of the memory map. Before a cold run, the files are dropped from the page cache. Prints gigabytes per second,
medians over `--rounds` runs in turn."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import monotonic
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from saccade.models.checkpoint import SafetensorsFolder
from saccade.models.read_ahead import NUM_READERS

SIDE, MATRICES_PER_FILE = 4096, 32  # a GB a file


def write_checkpoint(folder: Path, num_files: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for number in range(num_files):
        matrices = torch.randint(-999, 999, (MATRICES_PER_FILE, SIDE, SIDE), dtype=torch.int16, generator=generator)
        tensors = {f"{number}.{i}": matrix.view(torch.bfloat16) for i, matrix in enumerate(matrices.unbind())}
        save_file(tensors, folder / f"{number}.safetensors")


def drop(files: Sequence[Path]) -> None:
    os.sync()  # only clean pages are dropped
    for path in files:
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def gigabytes_per_second(folder: Path, num_readers: int, *, is_cold: bool) -> float:
    checkpoint = SafetensorsFolder.open(folder)
    if is_cold:
        drop(checkpoint.files)
    begin, num_bytes = monotonic(), 0
    with patch("saccade.models.read_ahead.NUM_READERS", num_readers):
        for _, tensor in checkpoint.tensors():
            torch.empty_like(tensor).copy_(tensor)
            num_bytes += tensor.nbytes
    return num_bytes / (monotonic() - begin) / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--gigabytes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    flags = parser.parse_args()
    with TemporaryDirectory() as made:
        folder = flags.folder or Path(made)
        if flags.folder is None:
            write_checkpoint(folder, flags.gigabytes)
        for is_cold in (True, False):
            found: dict[int, list[float]] = {0: [], NUM_READERS: []}
            for _ in range(flags.rounds):
                for num_readers, speeds in found.items():
                    speeds.append(gigabytes_per_second(folder, num_readers, is_cold=is_cold))
            for num_readers, speeds in found.items():
                print(f"{'cold' if is_cold else 'warm'}, {num_readers} readers: {median(speeds):.2f} GB/s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

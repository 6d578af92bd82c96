"""Reads files ahead of whoever reads them through a memory map.

A map fetches a file in small pieces, one at a time, when they are touched. Disks and network file systems are several
times as fast if they are asked for many pieces at once. So threads read what comes next, and the map finds it in the
page cache.
"""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Condition, Thread
from types import TracebackType
from typing import Self

import numpy as np

NUM_READERS = 8
PIECE_BYTES = 8 * 2**20
AHEAD_BYTES = 2 * 2**30  # if this were more than fits in memory, pieces would be dropped before they are used
NO_WAIT = getattr(os, "RWF_NOWAIT", 0)


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a file. `position` is its start if all files are one behind another."""

    file: Path
    start: int
    size: int
    position: int


class ReadAhead:
    """Reads every `num_shares`-th piece of the files, beginning with piece number `share`: processes that load the same
    files together divide the work. Errors are left to the map's reader."""

    def __init__(self, files: Sequence[Path], share: int = 0, num_shares: int = 1) -> None:
        self._left = deque(islice(pieces(files), share, None, num_shares))
        self._position = 0
        self._moved = Condition()  # guards both
        count = min(NUM_READERS, len(self._left))
        self._threads = [Thread(target=self._read, name="read-ahead", daemon=True) for _ in range(count)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._moved:
            self._left.clear()
            self._moved.notify_all()
        for thread in self._threads:
            thread.join()

    def reach(self, position: int) -> None:
        """The map has been read up to here."""
        with self._moved:
            self._position = position
            self._moved.notify_all()

    def _read(self) -> None:
        room = np.empty(PIECE_BYTES, np.uint8).data
        while (piece := self._next()) is not None:
            with suppress(OSError):
                fetch(piece, room)

    def _next(self) -> Piece | None:
        with self._moved:
            while self._left:
                first = self._left[0]
                if first.position < self._position + AHEAD_BYTES:
                    self._left.popleft()
                    if first.position + first.size > self._position:  # else the map was faster
                        return first
                else:
                    self._moved.wait()
        return None


def pieces(files: Sequence[Path]) -> Iterator[Piece]:
    position = 0
    for file in files:
        try:
            size = file.stat().st_size
        except OSError:
            continue
        for start in range(0, size, PIECE_BYTES):
            yield Piece(file, start, min(PIECE_BYTES, size - start), position + start)
        position += size


def fetch(piece: Piece, room: memoryview) -> None:
    """Reads a piece unless it is in the page cache already."""
    file = os.open(piece.file, os.O_RDONLY)
    try:
        if not _is_cached(file, piece):
            os.preadv(file, [room[: piece.size]], piece.start)
    finally:
        os.close(file)


def _is_cached(file: int, piece: Piece) -> bool:
    """Looks at its first and last byte. If the file system cannot tell, the answer is no."""
    if not NO_WAIT:
        return False
    try:
        return all(os.preadv(file, [bytearray(1)], at, NO_WAIT) for at in (piece.start, piece.start + piece.size - 1))
    except OSError:
        return False

"""Files are read ahead of the memory map: every piece once, within bounds, and never in the way of an error."""

from collections.abc import Iterator
from pathlib import Path
from threading import Condition
from threading import enumerate as threads

import pytest
import torch
from safetensors.torch import save_file

from saccade.errors import ConfigError
from saccade.models import read_ahead
from saccade.models.checkpoint import SafetensorsFolder
from saccade.models.read_ahead import Piece, ReadAhead, fetch, pieces

PIECE = 100


class Readers:
    """Notes what is read, and waits until that has happened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[str, int]] = []
        self._changed = Condition()
        monkeypatch.setattr(read_ahead, "fetch", self._note)

    def _note(self, piece: Piece, room: memoryview) -> None:
        with self._changed:
            self.found.append((piece.file.name, piece.start))
            self._changed.notify_all()

    def wait_for(self, count: int) -> list[tuple[str, int]]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.found) >= count, 60), self.found
            return sorted(self.found)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(read_ahead, "PIECE_BYTES", PIECE)
    yield
    assert not [thread for thread in threads() if thread.name == "read-ahead"], "a reader is left"


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Of three and of two pieces, the last of them short."""
    made = [tmp_path / name for name in ("a", "b")]
    made[0].write_bytes(bytes(3 * PIECE))
    made[1].write_bytes(bytes(PIECE + 1))
    return made


def test_pieces_cover_every_byte_once(files: list[Path]) -> None:
    found = [(piece.file.name, piece.start, piece.size, piece.position) for piece in pieces(files)]
    assert found == [
        ("a", 0, 100, 0),
        ("a", 100, 100, 100),
        ("a", 200, 100, 200),
        ("b", 0, 100, 300),
        ("b", 100, 1, 400),
    ]


def test_ranks_share_the_pieces(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    readers = Readers(monkeypatch)
    with ReadAhead(files, 0, 2):
        assert readers.wait_for(3) == [("a", 0), ("a", 200), ("b", 100)]
    with ReadAhead(files, 1, 2):
        assert readers.wait_for(5) == [("a", 0), ("a", 100), ("a", 200), ("b", 0), ("b", 100)]


def test_readers_stay_near_the_map_and_leave_out_what_it_has_passed(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "AHEAD_BYTES", PIECE)
    readers = Readers(monkeypatch)
    with ReadAhead(files) as ahead:
        assert readers.wait_for(1) == [("a", 0)]
        ahead.reach(3 * PIECE)  # the second and third are not needed any more
        assert readers.wait_for(2) == [("a", 0), ("b", 0)]
    assert len(readers.found) == 2, "the last piece is too far away"


def test_a_piece_that_cannot_be_read_is_left_to_the_map(tmp_path: Path, files: list[Path]) -> None:
    with ReadAhead(files):
        files[0].unlink()


def test_a_piece_is_read_unless_it_is_in_the_page_cache(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    files[0].write_bytes(bytes(range(PIECE)))
    room, [piece] = memoryview(bytearray(PIECE)), pieces(files[:1])
    monkeypatch.setattr(read_ahead, "_is_cached", lambda file, piece: True)
    fetch(piece, room)
    assert room == bytes(PIECE)
    monkeypatch.setattr(read_ahead, "_is_cached", lambda file, piece: False)
    fetch(piece, room)
    assert room == bytes(range(PIECE))


def test_where_the_page_cache_cannot_be_asked_pieces_are_read(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "NO_WAIT", 0)
    files[0].write_bytes(bytes(range(PIECE)))
    room, [piece] = memoryview(bytearray(PIECE)), pieces(files[:1])
    fetch(piece, room)
    assert room == bytes(range(PIECE))


def test_a_checkpoint_in_many_pieces_is_the_same(tmp_path: Path) -> None:
    written = {f"{name}.{i}": torch.randn(7, 9) for name in "ab" for i in range(5)}
    for name in "ab":
        own = {key: value for key, value in written.items() if key.startswith(name)}
        save_file(own, tmp_path / f"{name}.safetensors")
    found = dict(SafetensorsFolder.open(tmp_path).tensors())
    assert found.keys() == written.keys() and all(torch.equal(found[name], written[name]) for name in written)


def test_an_error_of_the_map_ends_the_readers(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1000)}, tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_bytes(bytes(1000))
    with pytest.raises(ConfigError, match="cannot be read"):
        list(SafetensorsFolder.open(tmp_path).tensors())


def test_a_file_that_is_gone_is_an_error_of_the_map(tmp_path: Path) -> None:
    """The hub's cache has links, and what they point to may have been deleted."""
    (tmp_path / "a.safetensors").symlink_to(tmp_path / "deleted")
    with pytest.raises(ConfigError, match=r"a\.safetensors cannot be read .*download it again"):
        list(SafetensorsFolder.open(tmp_path).tensors())


def test_a_loader_that_stops_in_the_middle_ends_the_readers(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1000), "b": torch.zeros(1000)}, tmp_path / "a.safetensors")
    tensors = SafetensorsFolder.open(tmp_path).tensors()
    next(iter(tensors))
    del tensors

"""What the markers of a JPEG tell about its cost, whatever lies between, inside and behind its segments."""

import struct
from contextlib import suppress

import pytest

from saccade.errors import RequestError
from saccade.inputs.media.headers import read_header
from saccade.inputs.media.images import ImageLimits, load_image
from saccade.inputs.media.jpeg import CHEAP_BYTES, count_visits, first_scan, is_cheap, is_plain, read_frame
from tests.inputs.hostile_files import many_scans, picture

LIMITS = ImageLimits()


def segment(marker: int, body: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


def with_first(data: bytes, inserted: bytes) -> bytes:
    """Right behind the marker that begins the file."""
    return data[:2] + inserted + data[2:]


@pytest.mark.parametrize("progressive", [False, True])
def test_what_follows_the_end_is_not_looked_at(progressive: bool) -> None:
    """Phones put films and further pictures there."""
    data = picture(64, 48, progressive=progressive)
    for other in (many_scans(8000, 8000, 3000), segment(0xE0, b"") * 5000):
        more = b"\0\2" + other  # with the marker of the end before it, an empty segment
        assert count_visits(data + more) == count_visits(data)
        assert load_image(data + more, LIMITS).shape == (48, 64, 3)


@pytest.mark.parametrize("progressive", [False, True])
def test_a_picture_inside_a_segment_is_not_the_picture(progressive: bool) -> None:
    """A thumbnail, for one."""
    data = picture(64, 48, progressive=progressive)
    both = with_first(data, segment(0xE1, b"Exif\0\0" + picture(16, 8, progressive=not progressive)))
    assert count_visits(both) == count_visits(data) and is_plain(both) is is_plain(data) is not progressive
    assert read_frame(both) == read_frame(data) and read_header(both) == read_header(data)
    assert first_scan(both) - first_scan(data) == len(both) - len(data)


@pytest.mark.parametrize("table", [0xC4, 0xC8, 0xCC])
def test_a_table_before_the_frame_is_no_frame(table: int) -> None:
    data = picture(64, 48)
    both = with_first(data, segment(table, struct.pack(">BHHB", 8, 1, 1, 3) + bytes(9)))
    assert read_header(both) == read_header(data) and read_frame(both) == read_frame(data)


def test_a_frame_behind_a_scan_is_not_the_frame() -> None:
    data = picture(64, 48)
    scan = data[data.index(b"\xff\xda") : -2]
    assert read_frame(with_first(data, scan)) is None and not is_plain(with_first(data, scan))


@pytest.mark.parametrize(
    "offset, size", [(5, 2), (7, 2), (9, 1), (11, 1)], ids=["height", "width", "count", "sampling"]
)
def test_a_frame_of_nothing_is_none(offset: int, size: int) -> None:
    data = bytearray(picture(64, 48))
    at = data.index(b"\xff\xc0") + offset
    for mask in (0x00, 0xF0, 0x0F) if offset == 11 else (0x00,):
        changed = bytes(data[:at]) + bytes(byte & mask for byte in data[at : at + size]) + bytes(data[at + size :])
        assert read_frame(changed) is None and not is_plain(changed) and count_visits(changed) == 0


def test_only_huffman_codes_and_few_bytes_are_cheap() -> None:
    plain, progressive, behind = picture(64, 48), picture(64, 48, progressive=True), bytes(CHEAP_BYTES)
    assert is_cheap(plain) and is_cheap(progressive) and is_cheap(plain + behind)
    assert not is_cheap(progressive + behind), "all of it would be looked through"
    for marker in (0xC3, 0xC9, 0xCA):
        assert not is_cheap(plain.replace(b"\xff\xc0", bytes([0xFF, marker])))


@pytest.mark.parametrize("progressive", [False, True])
def test_a_file_may_end_anywhere(progressive: bool) -> None:
    data = picture(8, 8, progressive=progressive)
    whole = count_visits(data)
    for end in range(len(data)):
        is_plain(data[:end]), is_cheap(data[:end]), read_frame(data[:end])
        assert count_visits(data[:end]) <= whole and first_scan(data[:end]) <= end
        with suppress(RequestError):
            load_image(data[:end], LIMITS)

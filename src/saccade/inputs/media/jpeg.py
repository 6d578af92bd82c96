"""What a JPEG costs to decode, read from its markers. A scan that carries no data still visits every block of its
components, so a few hundred kilobytes can keep a decoder busy for minutes. Nothing here decodes anything."""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from saccade.errors import RequestError
from saccade.inputs.media.headers import START_OF_FRAME

MAX_SEGMENTS = 1000  # a colour profile of 16 MB has 255
MAX_SCANS = 500
# A usual progressive file visits every block six to ten times. Small images may have more.
MAX_VISITS, FREE_VISITS = 40, 2**20
CHEAP_PIXELS, CHEAP_BYTES, CHEAP_VISITS = 4 * 2**20, 2**20, 2**19
MAX_SEGMENT_BYTES = 2**16
CHEAP_HEAD_BYTES = 128 * 2**10  # before the first scan: metadata, which Pillow reads entry by entry

_END, _START_OF_SCAN = 0xD9, 0xDA
_SEQUENTIAL = frozenset({0xC0, 0xC1})  # with Huffman codes
_HUFFMAN = _SEQUENTIAL | {0xC2}
# Those without a segment are passed over here, because there may be millions.
_NEXT_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")


@dataclass(frozen=True, slots=True)
class JpegFrame:
    """The frame header: the number of blocks of every component, by its id."""

    marker: int
    height: int
    width: int
    num_blocks: dict[int, int]


def is_cheap(data: bytes) -> bool:
    """Whether decoding takes some 30 ms at most, whatever the file contains: in one pass, or in scans that visit few
    blocks, with little metadata."""
    head = data[: CHEAP_HEAD_BYTES + MAX_SEGMENT_BYTES]  # however long the rest is, it is not looked through
    frame = read_frame(head)
    if frame is None or frame.height * frame.width > CHEAP_PIXELS or frame.marker not in _HUFFMAN:
        return False
    if first_scan(head) > CHEAP_HEAD_BYTES:
        return False
    return is_plain(data) or (len(data) <= CHEAP_BYTES and count_visits(data) <= CHEAP_VISITS)


def is_plain(data: bytes) -> bool:
    """Whether one pass decodes the file: sequential, all components in one scan. Reads the headers only. Its cost is
    then known from its pixels, as libjpeg reads no second scan of such a file."""
    frame = None
    for num_segments, (marker, at, size) in enumerate(_segments(data)):
        if marker in START_OF_FRAME:
            if frame is not None:
                return False
            frame = _read_frame(data, marker, at, size)
            if frame is None or marker not in _SEQUENTIAL:
                return False
        elif marker == _START_OF_SCAN:
            return frame is not None and size > 0 and data[at] == len(frame.num_blocks)
        if num_segments > MAX_SEGMENTS:
            return False
    return False


def count_visits(data: bytes) -> int:
    """How many blocks all scans of a file visit together. Refuses what no encoder writes."""
    frame, num_scans, num_visits = None, 0, 0
    for num_segments, (marker, at, size) in enumerate(_segments(data)):
        if num_segments - num_scans > MAX_SEGMENTS + 4 * num_scans:  # tables before each scan
            raise _refuse(f"it has more than {num_segments} segments")
        if marker in START_OF_FRAME:
            frame = _read_frame(data, marker, at, size) or frame
        elif marker == _START_OF_SCAN and frame is not None:
            num_scans += 1
            num_visits += _visited(data, at, size, frame)
            limit = MAX_VISITS * sum(frame.num_blocks.values()) + FREE_VISITS
            if num_scans > MAX_SCANS or num_visits > limit:
                raise _refuse(f"it has more than {num_scans - 1} scans over {frame.width}x{frame.height} pixels")
    return num_visits


def read_frame(data: bytes) -> JpegFrame | None:
    """The first frame header, before any scan."""
    for num_segments, (marker, at, size) in enumerate(_segments(data)):
        if marker in START_OF_FRAME:
            return _read_frame(data, marker, at, size)
        if marker == _START_OF_SCAN or num_segments > MAX_SEGMENTS:
            return None
    return None


def first_scan(data: bytes) -> int:
    """Where the first scan begins; the end if there is none."""
    for num_segments, (marker, at, _) in enumerate(_segments(data)):
        if marker == _START_OF_SCAN:
            return at
        if num_segments > MAX_SEGMENTS:
            break
    return len(data)


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Marker, place and size of every segment up to the end of the image. Bytes between segments, the data of scans
    among them, are skipped as libjpeg skips them."""
    at = 0
    while (found := _NEXT_MARKER.search(data, at)) is not None:
        marker, at = data[found.start() + 1], found.end()
        if marker == _END:
            return
        if at + 2 > len(data):
            return
        (length,) = struct.unpack_from(">H", data, at)
        size = min(max(length - 2, 0), len(data) - at - 2)
        yield marker, at + 2, size
        at += 2 + size


def _read_frame(data: bytes, marker: int, at: int, size: int) -> JpegFrame | None:
    if size < 6:
        return None
    height, width, count = struct.unpack_from(">HHB", data, at + 1)
    if size < 6 + 3 * count or not count or not height or not width:
        return None
    parts = [(data[i], data[i + 1] >> 4, data[i + 1] & 15) for i in range(at + 6, at + 6 + 3 * count, 3)]
    if not all(across and down for _, across, down in parts):
        return None
    most_across, most_down = max(part[1] for part in parts), max(part[2] for part in parts)
    blocks = {
        id_: -(-width * across // (8 * most_across)) * -(-height * down // (8 * most_down))
        for id_, across, down in parts
    }
    return JpegFrame(marker, height, width, blocks)


def _visited(data: bytes, at: int, size: int, frame: JpegFrame) -> int:
    count = min(data[at], (size - 1) // 2) if size else 0
    return sum(frame.num_blocks.get(data[i], 0) for i in range(at + 1, at + 1 + 2 * count, 2))


def _refuse(met: str) -> RequestError:
    message = f"the JPEG takes too long to decode: {met}; save it again with a usual encoder"
    return RequestError(message, code="image_too_complex", status=413)

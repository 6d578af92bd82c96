"""Format and size of an encoded image, read from its first bytes. Limits are checked on these before any decoder sees
the data: opening a file with one may already allocate a canvas (WebP) or walk every chunk."""

import re
import struct
from dataclasses import dataclass
from typing import Literal

Format = Literal["JPEG", "PNG", "WEBP", "GIF", "BMP"]

# Start-of-frame markers; C4, C8 and CC in this range are tables and extensions.
START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
MAX_MARKERS = 10_000  # before the frame; what is decoded may have fewer
# The next marker, behind some fill bytes and markers without a segment. Millions of them are no image.
_MARKER = re.compile(rb"(?:\xff{1,4096}+[\x01\xd0-\xd7]){0,64}+\xff{1,4096}+[^\xff]")


@dataclass(frozen=True, slots=True)
class Header:
    """`components` counts colour channels and is known for JPEG only."""

    format: Format
    height: int
    width: int
    components: int | None = None


def read_header(data: bytes) -> Header | None:
    """None if the format is unknown or the data ends before its size."""
    try:
        return _read(data)
    except (struct.error, IndexError):
        return None


def _read(data: bytes) -> Header | None:
    if data.startswith(b"\xff\xd8\xff"):
        return _read_jpeg(data)
    if data.startswith(b"\x89PNG\r\n\x1a\n") and data[12:16] == b"IHDR":
        width, height = struct.unpack_from(">II", data, 16)
        return Header("PNG", height, width)
    if data.startswith((b"GIF87a", b"GIF89a")):
        width, height = struct.unpack_from("<HH", data, 6)
        return Header("GIF", height, width)
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return _read_webp(data)
    if data.startswith(b"BM"):
        return _read_bmp(data)
    return None


def _read_jpeg(data: bytes) -> Header | None:
    at = 2
    for _ in range(MAX_MARKERS):
        found = _MARKER.match(data, at)
        if found is None:
            return None
        marker, at = data[found.end() - 1], found.end()
        (length,) = struct.unpack_from(">H", data, at)
        if marker in START_OF_FRAME:
            height, width, components = struct.unpack_from(">HHB", data, at + 3)
            return Header("JPEG", height, width, components)
        if marker in (0xD9, 0xDA) or length < 2:
            return None
        at += length
    return None


def _read_webp(data: bytes) -> Header | None:
    kind = data[12:16]
    if kind == b"VP8X":
        width = 1 + int.from_bytes(data[24:27], "little")
        height = 1 + int.from_bytes(data[27:30], "little")
        return Header("WEBP", height, width) if len(data) >= 30 else None
    if kind == b"VP8L" and data[20] == 0x2F:
        (bits,) = struct.unpack_from("<I", data, 21)
        return Header("WEBP", 1 + (bits >> 14 & 0x3FFF), 1 + (bits & 0x3FFF))
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return Header("WEBP", height & 0x3FFF, width & 0x3FFF)
    return None


def _read_bmp(data: bytes) -> Header | None:
    (header_bytes,) = struct.unpack_from("<I", data, 14)
    if header_bytes == 12:
        width, height = struct.unpack_from("<HH", data, 18)
        return Header("BMP", height, width)
    width, height = struct.unpack_from("<ii", data, 18)
    return Header("BMP", abs(height), abs(width))

"""Files that are small to send and expensive to decode."""

import io
import struct
from collections.abc import Sequence
from typing import Any

from PIL import Image


def picture(width: int, height: int, format_: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (200, 90, 30)).save(buffer, format_, **options)
    return buffer.getvalue()


def many_scans(width: int, height: int, num_scans: int, *, progressive: bool = True) -> bytes:
    """A JPEG that repeats its last scan without data: each repetition visits all blocks."""
    data = picture(8, 8, progressive=True) if progressive else _not_interleaved()
    frame = data.index(b"\xff\xc2" if progressive else b"\xff\xc0")
    data = data[: frame + 5] + struct.pack(">HH", height, width) + data[frame + 9 :]
    scan = data.rindex(b"\xff\xda")
    (length,) = struct.unpack_from(">H", data, scan + 2)
    return data[:-2] + data[scan : scan + 2 + length] * num_scans + b"\xff\xd9"


def _not_interleaved() -> bytes:
    """A sequential JPEG with one scan for each component."""
    data = picture(8, 8, subsampling=0)
    scan = data.index(b"\xff\xda")
    scans = (b"\xff\xda" + struct.pack(">HB", 8, 1) + bytes([id_, 0, 0, 63, 0]) + b"\x00" for id_ in (1, 2, 3))
    return data[:scan] + b"".join(scans) + b"\xff\xd9"


def growing_gif(sizes: Sequence[tuple[int, int]]) -> bytes:
    """Frames of the given sizes (width, height). The first is also the size of the screen."""
    data = b"GIF89a" + struct.pack("<HHBBB", *sizes[0], 0x80, 0, 0) + bytes([0, 0, 0, 255, 255, 255])
    for width, height in sizes:
        data += b"\x21\xf9\x04\x00" + struct.pack("<H", 10) + b"\x00\x00"
        data += b"\x2c" + struct.pack("<HHHHB", 0, 0, width, height, 0) + _lzw_of_zeros(width * height)
    return data + b"\x3b"


def _lzw_of_zeros(num_pixels: int) -> bytes:
    """`num_pixels` pixels of colour 0. Each code uses the newest entry, so that n codes make n * (n + 1) / 2 pixels."""
    codes: list[tuple[int, int]] = []  # value and width
    left, following, width, run = num_pixels, 6, 3, 0
    codes.append((4, width))
    while left > 0:
        run = min(run + 1, left)
        codes.append((0 if run == 1 else following + run - 2, width))
        left -= run
        if following + run - 1 >= 1 << width and width < 12:
            width += 1
        if following + run - 1 >= 4095:
            codes.append((4, width))
            width, run = 3, 0
    codes.append((5, width))
    bits = at = 0
    out = bytearray()
    for value, size in codes:
        bits |= value << at
        at += size
        while at >= 8:
            out.append(bits & 255)
            bits, at = bits >> 8, at - 8
    out.append(bits & 255)
    blocks = (bytes(out[i : i + 255]) for i in range(0, len(out), 255))
    return b"\x02" + b"".join(bytes([len(block)]) + block for block in blocks) + b"\x00"


def motion_jpeg(frames: Sequence[bytes], width: int, height: int) -> bytes:
    """An AVI file that claims the given size, with any JPEGs as frames."""
    count = len(frames)
    main = struct.pack("<10I16x", 40_000, 0, 0, 0x10, count, 0, 1, 0, width, height)
    stream = b"vidsMJPG" + struct.pack("<IHH7IiI4H", 0, 0, 0, 0, 1, 25, 0, count, 0, 0, 0, 0, 0, 0, width, height)
    shape = struct.pack("<IiiHH4sIiiII", 40, width, height, 1, 24, b"MJPG", width * height * 3, 0, 0, 0, 0)
    head = _list(b"hdrl", _chunk(b"avih", main) + _list(b"strl", _chunk(b"strh", stream) + _chunk(b"strf", shape)))
    body = b"AVI " + head + _list(b"movi", b"".join(_chunk(b"00dc", frame) for frame in frames))
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _chunk(name: bytes, data: bytes) -> bytes:
    return name + struct.pack("<I", len(data)) + data + bytes(len(data) % 2)


def _list(name: bytes, data: bytes) -> bytes:
    return _chunk(b"LIST", name + data)

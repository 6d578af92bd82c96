"""Reads the sizes of all frames of an animated GIF or WebP before any is decoded. After a first frame of 64x64 pixels
the next one can be huge, and Pillow enlarges the whole canvas for it."""

import struct
from dataclasses import dataclass

from saccade.errors import RequestError

MAX_BLOCKS = 2_000_000  # of up to 255 bytes; walking them takes about a second
MAX_ANIMATION_PIXELS = 2**31  # of all frames, before thinning; decoding takes about 15 s

_TRAILER, _EXTENSION, _IMAGE = 0x3B, 0x21, 0x2C


@dataclass(frozen=True, slots=True)
class Animation:
    height: int
    width: int
    num_frames: int


def measure_animation(data: bytes, height: int, width: int) -> Animation:
    """The number of frames and a canvas that holds all of them, at least as large as the header says. A truncated file
    has the frames before the cut."""
    read = _read_gif if data.startswith(b"GIF") else _read_webp
    found = read(data, height, width)
    if found.num_frames * found.height * found.width > MAX_ANIMATION_PIXELS:
        problem = f"the video has {found.num_frames} frames of {found.width}x{found.height} pixels"
        message = f"{problem}; the limit is {MAX_ANIMATION_PIXELS} pixels to decode: send fewer or smaller frames"
        raise RequestError(message, code="video_too_large", status=413)
    return found


def _read_gif(data: bytes, height: int, width: int) -> Animation:
    """Walks the blocks of a GIF without decompressing any."""
    num_frames = num_blocks = 0
    try:
        at = 13 + _table_bytes(data[10])
        while (kind := data[at]) != _TRAILER:
            at, num_blocks = at + 1, num_blocks + 1
            if kind == _IMAGE:
                left, top, across, down, flags = struct.unpack_from("<HHHHB", data, at)
                num_frames, height, width = num_frames + 1, max(height, top + down), max(width, left + across)
                at += 10 + _table_bytes(flags)
            elif kind == _EXTENSION:
                at += 1
            while kind in (_IMAGE, _EXTENSION) and (size := data[at]):
                at, num_blocks = at + 1 + size, num_blocks + 1
                if num_blocks > MAX_BLOCKS:
                    break
            at += kind in (_IMAGE, _EXTENSION)
            if num_blocks > MAX_BLOCKS:
                raise _too_many(f"more than {MAX_BLOCKS} blocks")
    except (IndexError, struct.error):
        pass
    return Animation(height, width, num_frames)


def _table_bytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _read_webp(data: bytes, height: int, width: int) -> Animation:
    """The frames of a WebP never exceed its canvas."""
    at, num_frames, num_chunks = 12, 0, 0
    while at + 8 <= len(data):
        num_frames += data[at : at + 4] == b"ANMF"
        (size,) = struct.unpack_from("<I", data, at + 4)
        at += 8 + size + size % 2
        num_chunks += 1
        if num_chunks > MAX_BLOCKS:
            raise _too_many(f"more than {MAX_BLOCKS} chunks")
    return Animation(height, width, num_frames)


def _too_many(what: str) -> RequestError:
    message = f"the video has {what}; re-encode it with a standard encoder"
    return RequestError(message, code="video_too_large", status=413)

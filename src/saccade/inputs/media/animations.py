"""Sizes of all frames of an animated GIF or WebP, read before any of them is decoded: a first frame of 64x64 pixels
says nothing about the next one, for which Pillow makes the whole canvas larger."""

import struct
from dataclasses import dataclass

from saccade.errors import RequestError

MAX_BLOCKS = 2_000_000  # of up to 255 bytes; reading them takes about a second
MAX_ANIMATION_PIXELS = 2**31  # to be decoded, before frames are left out; about a quarter of a minute

_TRAILER, _EXTENSION, _IMAGE = 0x3B, 0x21, 0x2C


@dataclass(frozen=True, slots=True)
class Animation:
    height: int
    width: int
    num_frames: int


def measure_animation(data: bytes, height: int, width: int) -> Animation:
    """The canvas that holds all frames, and how many there are. The canvas is at least as large as the header's. A file
    that ends too early has the frames before the break."""
    read = _read_gif if data.startswith(b"GIF") else _read_webp
    found = read(data, height, width)
    if found.num_frames * found.height * found.width > MAX_ANIMATION_PIXELS:
        met = f"the video has {found.num_frames} frames of {found.width}x{found.height} pixels"
        message = f"{met}; the limit is {MAX_ANIMATION_PIXELS} pixels to decode: send fewer or smaller frames"
        raise RequestError(message, code="video_too_large", status=413)
    return found


def _read_gif(data: bytes, height: int, width: int) -> Animation:
    """Walks the blocks of a GIF without unpacking any."""
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
    """Frames never leave the canvas of a WebP."""
    at, num_frames, num_chunks = 12, 0, 0
    while at + 8 <= len(data):
        num_frames += data[at : at + 4] == b"ANMF"
        (size,) = struct.unpack_from("<I", data, at + 4)
        at += 8 + size + size % 2
        num_chunks += 1
        if num_chunks > MAX_BLOCKS:
            raise _too_many(f"more than {MAX_BLOCKS} chunks")
    return Animation(height, width, num_frames)


def _too_many(met: str) -> RequestError:
    return RequestError(f"the video has {met}; save it again with a usual encoder", code="video_too_large", status=413)

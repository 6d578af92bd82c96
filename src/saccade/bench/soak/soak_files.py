"""Images and videos of a soak: good ones of many sizes, and files that are broken or costly to decode."""

import base64
import io
import struct
from random import Random

import numpy as np
from PIL import Image

FORMATS = ("JPEG", "JPEG", "PNG", "WEBP")
MIN_SIDE, MAX_SIDE = 28, 512
NUM_SCANS = 2000  # so many scans keep a JPEG decoder busy for many seconds


def image_sizes(count: int, seed: int) -> tuple[tuple[int, int], ...]:
    """Draws distinct sizes (width, height), in the order in which they are sent."""
    random, found = Random(f"{seed}:sizes"), dict[tuple[int, int], None]()
    while len(found) < count:
        found[random.randint(MIN_SIDE, MAX_SIDE), random.randint(MIN_SIDE, MAX_SIDE)] = None
    return tuple(found)


def picture(size: tuple[int, int], random: Random, format_: str = "") -> bytes:
    """Draws noise in coarse blocks, so that all pictures differ and encoding is fast."""
    rng = np.random.default_rng(random.getrandbits(32))
    blocks = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    buffer = io.BytesIO()
    blocks.resize(size, Image.Resampling.NEAREST).save(buffer, format_ or random.choice(FORMATS))
    return buffer.getvalue()


def animation(random: Random) -> bytes:
    """A short GIF."""
    side = random.randint(32, 96)
    frames = [Image.new("RGB", (side, side), tuple(random.randbytes(3))) for _ in range(4)]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:], duration=100)
    return buffer.getvalue()


def truncated_picture(random: Random) -> bytes:
    """A PNG without its end."""
    data = picture((random.randint(64, 256), 64), random, "PNG")
    return data[: random.randint(40, len(data) // 2)]


def scans(random: Random) -> bytes:
    """A JPEG of 8000x8000 pixels that repeats the header of its last scan, without data."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), tuple(random.randbytes(3))).save(buffer, "JPEG", progressive=True)
    data = buffer.getvalue()
    frame, scan = data.index(b"\xff\xc2"), data.rindex(b"\xff\xda")
    (length,) = struct.unpack_from(">H", data, scan + 2)
    head = data[: frame + 5] + struct.pack(">HH", 8000, 8000) + data[frame + 9 : -2]
    return head + data[scan : scan + 2 + length] * NUM_SCANS + b"\xff\xd9"


def growing_animation(random: Random) -> bytes:
    """A GIF with a small first frame, and a second one of 169 million pixels."""
    data = b"GIF89a" + struct.pack("<HHBBB", 64, 64, 0x80, 0, 0) + bytes(3) + random.randbytes(3)
    for side in (64, 13000):
        data += b"\x2c" + struct.pack("<HHHHB", 0, 0, side, side, 0) + b"\x02\x02\x4c\x01\x00"
    return data + b"\x3b"


def part(kind: str, data: bytes) -> dict[str, object]:
    """A message part of `kind` image or video."""
    return url_part(kind, f"data:{kind}/any;base64,{base64.b64encode(data).decode()}")


def url_part(kind: str, url: str) -> dict[str, object]:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}

"""Images of a workload: sizes (one, a range, or a weighted mix), and pixels generated from a seed."""

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import inf

import numpy as np
import pybase64
import simplejpeg
from PIL import Image

from saccade.bench.load.load_settings import WorkloadSettings
from saccade.errors import ConfigError

Size = tuple[int, int]  # width, height
NAMED: dict[str, Size] = {"360p": (640, 360), "720p": (1280, 720), "1080p": (1920, 1080), "4k": (3840, 2160)}
MAX_SIDE = 16384
NUM_THREADS = 4  # encoders release the GIL


@dataclass(frozen=True, slots=True)
class SizeRange:
    """Width and height are drawn independently."""

    low: Size
    high: Size
    weight: float = 1.0


def parse_sizes(text: str) -> list[SizeRange]:
    """Parses WIDTHxHEIGHT, a name such as 720p, `random:LOW-HIGH`, or `mix:SIZE,SIZE:WEIGHT`."""
    kind, colon, rest = text.strip().partition(":")
    try:
        if kind == "random" and colon:
            low, _, high = rest.partition("-")
            found = [SizeRange(_size(low), _size(high))]
        elif kind == "mix" and colon:
            pairs = [part.partition(":")[::2] for part in rest.split(",")]
            found = [SizeRange(_size(name), _size(name), float(weight or 1)) for name, weight in pairs]
        else:
            found = [SizeRange(_size(text), _size(text))]
        is_right = all(0 < each.weight < inf and np.less_equal(each.low, each.high).all() for each in found)
    except ValueError:
        is_right = False
    if not is_right:
        raise ConfigError(
            f"image_resolution is {text!r}; write WIDTHxHEIGHT (sides of 1..{MAX_SIDE}), {', '.join(NAMED)}, "
            "random:224x224-1280x720 or mix:224x224,448x336:2 (--image-resolution)"
        )
    return found


def _size(text: str) -> Size:
    name = text.strip().lower()
    if name in NAMED:
        return NAMED[name]
    width, height = (int(side) if side.isascii() and side.isdigit() else 0 for side in name.split("x"))
    if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE):
        raise ValueError(text)
    return width, height


def draw_size(ranges: Sequence[SizeRange], rng: np.random.Generator) -> Size:
    weights = np.array([each.weight for each in ranges])
    drawn = ranges[int(rng.choice(len(ranges), p=weights / weights.sum()))]
    width, height = (int(rng.integers(low, high + 1)) for low, high in zip(drawn.low, drawn.high, strict=True))
    return width, height


def make_images(sizes: Sequence[Size], settings: WorkloadSettings) -> list[str]:
    """Makes a base64 image of each size. Each has its own seed, so its pixels do not depend on the others."""

    def make(index: int) -> str:
        rng = np.random.default_rng((settings.seed, index))
        return pybase64.b64encode_as_string(_encode(_pixels(sizes[index], settings.image_content, rng), settings))

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        return list(threads.map(make, range(len(sizes))))


def _pixels(size: Size, content: str, rng: np.random.Generator) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Noise, or white with one pixel that makes blank images differ."""
    width, height = size
    if content == "random":
        return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    pixels = np.full((height, width, 3), 255, dtype=np.uint8)
    pixels[0, 0] = rng.integers(0, 256, 3)
    return pixels


def _encode(pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], settings: WorkloadSettings) -> bytes:
    if settings.image_format == "jpeg":
        quality = settings.image_quality
        made: bytes = simplejpeg.encode_jpeg(pixels, quality=quality, colorspace="RGB", colorsubsampling="420")
        return made
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()

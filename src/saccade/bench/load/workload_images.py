"""Images of a workload: sizes that are drawn, and pixels generated from a seed."""

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pybase64
import simplejpeg
from PIL import Image

from saccade.bench.load.load_settings import Size, SizeRange, WorkloadSettings

NUM_THREADS = 4  # encoders release the GIL


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

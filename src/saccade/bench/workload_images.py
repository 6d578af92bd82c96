"""Images of a workload: made from a seed, and given as the data URLs that requests carry."""

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pybase64
import simplejpeg
from PIL import Image

from saccade.bench.workload_sizes import Size

NUM_THREADS = 4  # encoders leave the interpreter lock


@dataclass(frozen=True, slots=True)
class ImageStyle:
    format: str = "jpeg"
    content: str = "random"
    quality: int = 85


@dataclass(frozen=True, slots=True)
class Picture:
    size: Size
    num_bytes: int
    base64: str


def make_pictures(sizes: Sequence[Size], style: ImageStyle, seed: int) -> list[Picture]:
    """One picture a size. Each has a seed of its own, so that its pixels do not depend on the others."""
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        return list(threads.map(lambda index: _picture(sizes[index], style, (seed, index)), range(len(sizes))))


def _picture(size: Size, style: ImageStyle, seed: tuple[int, int]) -> Picture:
    data = encode(draw(size, style.content, seed), style)
    return Picture(size, len(data), pybase64.b64encode_as_string(data))


def draw(size: Size, content: str, seed: tuple[int, int]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Noise, or white with one pixel that tells it from the other blank ones."""
    rng = np.random.default_rng(seed)
    if content == "random":
        return rng.integers(0, 256, (*size, 3), dtype=np.uint8)
    pixels = np.full((*size, 3), 255, dtype=np.uint8)
    pixels[0, 0] = rng.integers(0, 256, 3)
    return pixels


def encode(pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], style: ImageStyle) -> bytes:
    if style.format == "jpeg":
        made: bytes = simplejpeg.encode_jpeg(pixels, quality=style.quality, colorspace="RGB", colorsubsampling="420")
        return made
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()

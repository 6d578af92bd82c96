"""A fuzzer for all code that reads media: headers, JPEG markers, animations, containers, data URLs and decoders.

Case i of a seed is always the same bytes: `python -m tests.inputs.fuzz_media --seed 7 --only 1234` repeats one, and
`--minutes 30` runs new ones until time is up. A case must give pixels within the limits, or a RequestError with a
printable text. Decoders run in the processes of a MediaPool, as in a server, so that a crash is reported and does not
end the fuzzer.
"""

import base64
import io
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from PIL import Image

from saccade.errors import RequestError
from saccade.inputs.allowance import ANYTHING
from saccade.inputs.media.animations import measure_animation
from saccade.inputs.media.headers import read_header
from saccade.inputs.media.images import ImageLimits, measure_image, read_data_url
from saccade.inputs.media.jpeg import count_visits, is_cheap, is_plain, read_frame
from saccade.inputs.media.media_pool import MediaPool
from tests.fuzzing import fuzz, fuzz_reader
from tests.inputs.hostile_files import growing_gif, many_scans, motion_jpeg, picture

LIMITS = ImageLimits(max_bytes=2**20, max_pixels=2**20, max_frames=32, max_video_pixels=2**22)
MAX_CPU_S = 5.0  # for a parser and a file below a megabyte; milliseconds are normal
_INTERESTING = (0, 1, 2, 3, 4, 7, 8, 0x2C, 0x21, 0x3B, 0x7F, 0x80, 0xC0, 0xC2, 0xC4, 0xD8, 0xD9, 0xDA, 0xDB, 0xFE, 0xFF)


class FoundError(AssertionError):
    """A case that gave neither pixels nor a refusal."""


@dataclass(frozen=True, slots=True)
class Case:
    seed: int
    index: int
    name: str
    data: bytes


def corpus() -> dict[str, bytes]:
    """Small files of every accepted kind, and of kinds that once caused trouble."""
    rng = np.random.default_rng(0)
    noise = Image.fromarray(rng.integers(0, 256, (24, 40, 4), dtype=np.uint8))
    frames = [noise.convert("P").rotate(90 * i, expand=False) for i in range(3)]
    exif = Image.Exif()
    exif[0x0112] = 6
    return {
        "jpeg": _saved(noise.convert("RGB"), "JPEG"),
        "grey": _saved(noise.convert("L"), "JPEG"),
        "cmyk": _saved(noise.convert("CMYK"), "JPEG"),
        "turned": _saved(noise.convert("RGB"), "JPEG", exif=exif),
        "progressive": _saved(noise.convert("RGB"), "JPEG", progressive=True),
        "scans": many_scans(40, 24, 30),
        "sequential scans": many_scans(40, 24, 30, progressive=False),
        "png": _saved(noise, "PNG"),
        "palette": _saved(noise.convert("P"), "PNG"),
        "webp": _saved(noise, "WEBP"),
        "lossless": _saved(noise, "WEBP", lossless=True),
        "moving webp": _saved(frames[0], "WEBP", save_all=True, append_images=frames[1:]),
        "gif": _saved(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "growing gif": growing_gif([(16, 16), (40, 24), (8, 8)]),
        "bmp": _saved(noise.convert("RGB"), "BMP"),
        "avi": motion_jpeg([picture(40, 24)] * 3, 40, 24),
        "growing avi": motion_jpeg([picture(16, 16), picture(40, 24)], 16, 16),
    }


def _saved(image: Image.Image, format_: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format_, **options)
    return buffer.getvalue()


def make_case(seed: int, index: int, seeds: dict[str, bytes]) -> Case:
    random = Random(f"{seed}:{index}")
    name = random.choice(sorted(seeds))
    data = bytearray(seeds[name])
    for _ in range(random.choice((0, 1, 1, 2, 3, 8))):
        random.choice(_MUTATIONS)(data, random, seeds)
        del data[LIMITS.max_bytes :]
    return Case(seed, index, name, bytes(data))


def _flip(data: bytearray, random: Random, seeds: dict[str, bytes]) -> None:
    if data:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def _set(data: bytearray, random: Random, seeds: dict[str, bytes]) -> None:
    if data:
        data[random.randrange(len(data))] = random.choice(_INTERESTING)


def _number(data: bytearray, random: Random, seeds: dict[str, bytes]) -> None:
    """Writes a length or size that is too large, too small or nearly right, mostly near the start."""
    order, size = random.choice("<>"), random.choice("HI")
    value = random.choice((0, 1, 2, 8, 255, 256, 8000, 13000, 65535, 2**31 - 1, 2**32 - 1))
    at = random.randrange(max(1, min(len(data), random.choice((64, 256, len(data) + 1)))))
    data[at : at + struct.calcsize(size)] = struct.pack(order + size, value & (0xFFFF if size == "H" else 2**32 - 1))


def _cut(data: bytearray, random: Random, seeds: dict[str, bytes]) -> None:
    del data[random.randrange(len(data) + 1) :]


def _drop(data: bytearray, random: Random, seeds: dict[str, bytes]) -> None:
    at = random.randrange(len(data) + 1)
    del data[at : at + random.choice((1, 2, 4, 64, 500))]


def _repeat(data: bytearray, random: Random, seeds: dict[str, bytes]) -> None:
    at, size = random.randrange(len(data) + 1), random.choice((1, 4, 10, 60, 700))
    data[at:at] = data[at : at + size] * random.choice((1, 2, 50, 1000))


def _splice(data: bytearray, random: Random, seeds: dict[str, bytes]) -> None:
    other = seeds[random.choice(sorted(seeds))]
    start = random.randrange(len(other))
    at = random.randrange(len(data) + 1)
    data[at : at + random.choice((0, 0, 50))] = other[start : start + random.choice((8, 100, 5000))]


_MUTATIONS: tuple[Callable[[bytearray, Random, dict[str, bytes]], None], ...] = (
    *(_flip, _flip, _set, _set, _number, _number, _cut, _drop, _repeat, _splice),
)


def check_parsers(case: Case) -> None:
    """Checks the code that runs in the front end's process."""
    data = case.data
    with bounded(case):
        header = read_header(data)
        frame, plain = read_frame(data), is_plain(data)
        if plain and frame is None:
            raise FoundError("plain without a frame")
        for call in (lambda: is_cheap(data), lambda: count_visits(data)):
            _refused(call)
        if header is not None and header.format in ("GIF", "WEBP"):
            found = _refused(lambda: measure_animation(data, header.height, header.width))
            if found is not None and (found.height < header.height or found.width < header.width):
                raise FoundError(f"a canvas of {found}, smaller than {header}")
        measured = _refused(lambda: measure_image(data, LIMITS))
        if measured is not None and not 0 < measured.num_pixels <= LIMITS.max_pixels:
            raise FoundError(f"{measured.num_pixels} pixels passed")
        _check_url(case)


def _check_url(case: Case) -> None:
    """A data URL must give the bytes of the case; a mutated URL may give any bytes or be refused."""
    url = "data:image/png;base64," + base64.b64encode(case.data).decode()
    if read_data_url(url, LIMITS) != case.data:
        raise FoundError("a data URL gave other bytes")
    random, text = Random(f"{case.seed}:{case.index}:url"), bytearray(url.encode())
    for _ in range(3):
        random.choice((_flip, _set, _cut, _drop))(text, random, {})
    found = _refused(lambda: read_data_url(text.decode("latin-1"), LIMITS))
    if found is not None and len(found) > LIMITS.max_bytes:
        raise FoundError(f"{len(found)} bytes passed")


def check_decoders(case: Case, pool: MediaPool) -> None:
    """Checks the code that runs in processes that can be killed. Cheap files are decoded here, in bounded time."""
    with bounded(case):
        measured = _refused(lambda: measure_image(case.data, LIMITS))
        pixels = None if measured is None else _refused(lambda: pool.image(measured, LIMITS, ANYTHING))
    if pixels is not None and (pixels.shape[2:] != (3,) or pixels[..., 0].size > LIMITS.max_pixels):
        raise FoundError(f"an image of shape {pixels.shape}")
    video = _refused(lambda: pool.video(case.data, LIMITS, ANYTHING))
    if video is None:
        return
    frames, fps, _ = video
    if len(frames) > LIMITS.max_frames or frames[..., 0].size > LIMITS.max_video_pixels or not (fps is None or fps > 0):
        raise FoundError(f"a video of shape {frames.shape} at {fps}")


def _refused(call: Callable[[], Any]) -> Any:
    """The result, or None if it was refused with a text that may be shown."""
    try:
        return call()
    except RequestError as error:
        if not str(error).isprintable() or not 400 <= error.status < 500 or "crashed" in str(error):
            raise FoundError(f"refused with {error.status}: {error!r}") from error
        return None
    except Exception as error:
        raise FoundError(f"{type(error).__name__}: {error}") from error


@contextmanager
def bounded(case: Case) -> Iterator[None]:
    begun = time.thread_time()
    try:
        yield
    except FoundError:
        raise
    except Exception as error:
        raise FoundError(f"{type(error).__name__}: {error}") from error
    used = time.thread_time() - begun
    if used > MAX_CPU_S:
        raise FoundError(f"{used:.1f} seconds of CPU time")


def run_cases(seed: int, indices: Iterator[int], pool: MediaPool | None) -> Iterator[tuple[Case, FoundError | None]]:
    seeds = corpus()
    for index in indices:
        case = make_case(seed, index, seeds)
        try:
            check_parsers(case)
            if pool is not None:
                check_decoders(case, pool)
        except FoundError as error:
            yield case, error
        else:
            yield case, None


def main() -> int:
    given, pool = fuzz_reader(__doc__).parse_args(), MediaPool()
    try:
        return fuzz(given, lambda seed, indices: run_cases(seed, indices, pool))
    finally:
        pool.close()


if __name__ == "__main__":
    sys.exit(main())

"""Milliseconds to decode one 560x560 JPEG, in this process and in another: `python -m tests.inputs.decoding_latency`.
Medians of 200, and nine of ten."""

import io
import sys
from collections.abc import Callable
from time import perf_counter
from unittest import mock

import numpy as np
from PIL import Image

from saccade.inputs.allowance import ANYTHING
from saccade.inputs.media import media_pool
from saccade.inputs.media.images import ImageLimits, decode_image, measure_image
from saccade.inputs.media.media_pool import MediaPool

ROUNDS = 200
LIMITS = ImageLimits()


def picture(*, progressive: bool) -> bytes:
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 255, (70, 70, 3), dtype=np.uint8)).resize((560, 560))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90, progressive=progressive)
    return file.getvalue()


def timed(call: Callable[[], object]) -> str:
    seconds = []
    for _ in range(ROUNDS):
        begun = perf_counter()
        call()
        seconds.append(perf_counter() - begun)
    seconds.sort()
    return f"{seconds[ROUNDS // 2] * 1e3:.2f} ({seconds[ROUNDS * 9 // 10] * 1e3:.2f})"


def main() -> int:
    pool = MediaPool(2)
    try:
        for name, data in (("sequential", picture(progressive=False)), ("progressive", picture(progressive=True))):
            plain = timed(lambda data=data: decode_image(measure_image(data, LIMITS)))  # type: ignore[misc]
            chosen = timed(lambda data=data: pool.image(measure_image(data, LIMITS), LIMITS, ANYTHING))  # type: ignore[misc]
            with mock.patch.object(media_pool, "is_cheap", lambda data: False):
                away = timed(lambda data=data: pool.image(measure_image(data, LIMITS), LIMITS, ANYTHING))  # type: ignore[misc]
            sys.stdout.write(f"{name}: alone {plain}, as a server does {chosen}, in another process {away}\n")
    finally:
        pool.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

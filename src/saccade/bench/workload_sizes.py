"""Sizes of images: one, a range, or a weighted mix."""

from dataclasses import dataclass

import numpy as np

from saccade.errors import ConfigError

Size = tuple[int, int]  # height, width
NAMED: dict[str, Size] = {"360p": (360, 640), "720p": (720, 1280), "1080p": (1080, 1920), "4k": (2160, 3840)}
LARGEST_SIDE = 16384


@dataclass(frozen=True, slots=True)
class Sizes:
    """A range of sizes with its weight; height and width are drawn on their own."""

    low: Size
    high: Size
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class SizeMix:
    """What `--image-resolution` says."""

    parts: tuple[Sizes, ...]

    def draw(self, rng: np.random.Generator) -> Size:
        weights = np.array([part.weight for part in self.parts])
        part = self.parts[int(rng.choice(len(self.parts), p=weights / weights.sum()))]
        height, width = (int(rng.integers(low, high + 1)) for low, high in zip(part.low, part.high, strict=True))
        return height, width


def parse_sizes(text: str) -> SizeMix:
    """HEIGHTxWIDTH, a name such as 720p, `random:LOW-HIGH`, or `mix:SIZE,SIZE:WEIGHT`."""
    kind, colon, rest = text.strip().partition(":")
    if kind == "random" and colon:
        low, dash, high = rest.partition("-")
        sizes = Sizes(_size(low, text), _size(high, text)) if dash else None
        if sizes is None or any(a > b for a, b in zip(sizes.low, sizes.high, strict=True)):
            raise _wrong(text)
        return SizeMix((sizes,))
    if kind == "mix" and colon:
        return SizeMix(tuple(_weighted(part, text) for part in rest.split(",")))
    size = _size(text, text)
    return SizeMix((Sizes(size, size),))


def _weighted(part: str, text: str) -> Sizes:
    name, _, weight = part.partition(":")
    size = _size(name, text)
    try:
        value = float(weight or 1)
    except ValueError:
        raise _wrong(text) from None
    if not 0 < value < float("inf"):
        raise _wrong(text)
    return Sizes(size, size, value)


def _size(text: str, whole: str) -> Size:
    name = text.strip().lower()
    if name in NAMED:
        return NAMED[name]
    sides = name.split("x")
    if len(sides) != 2 or not all(side.isascii() and side.isdigit() for side in sides):
        raise _wrong(whole)
    height, width = int(sides[0]), int(sides[1])
    if not (1 <= height <= LARGEST_SIDE and 1 <= width <= LARGEST_SIDE):
        raise _wrong(whole)
    return height, width


def _wrong(text: str) -> ConfigError:
    return ConfigError(
        f"image_resolution is {text!r}; write HEIGHTxWIDTH (sides of 1..{LARGEST_SIDE}), {', '.join(NAMED)}, "
        "random:224x224-1280x1280 or mix:224x224,448x336:2 (--image-resolution)"
    )

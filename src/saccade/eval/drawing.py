"""Draws test pictures with Pillow. Shares no code with the generator of training pictures."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageFont

SHAPES = ("circle", "square", "triangle", "star", "cross", "diamond", "heart", "ring", "rectangle", "oval")
COLORS = (
    *("red", "green", "blue", "yellow", "orange", "purple"),
    *("pink", "brown", "black", "white", "gray", "cyan"),
)
BACKGROUNDS = ("white", "white", "black", "whitesmoke", "lightgray", "lightyellow", "lightblue", "darkslategray")
SIZES = ((128, 128), (160, 160), (224, 224), (256, 256), (320, 240), (240, 320), (400, 300), (512, 512), (300, 150))
"""Width and height. A model's image processor scales the larger ones down."""

_SMOOTH = 3
Color = tuple[int, int, int]
Random = np.random.Generator


@dataclass(frozen=True, slots=True)
class Thing:
    """A shape to draw. The centre is a fraction of the picture's size, the radius one of its shorter side."""

    shape: str
    color: str
    x: float
    y: float
    radius: float


def pick(random: Random, values: Sequence[str], without: Sequence[str] = ()) -> str:
    left = [value for value in values if value not in without]
    return left[int(random.integers(len(left)))]


def rgb(name: str) -> Color:
    red, green, blue = ImageColor.getrgb(name)[:3]
    return red, green, blue


def visible_colors(background: str) -> list[str]:
    return [color for color in COLORS if math.dist(rgb(color), rgb(background)) > 120]


def new_canvas(random: Random) -> tuple[str, tuple[int, int]]:
    return pick(random, BACKGROUNDS), SIZES[int(random.integers(len(SIZES)))]


def place(
    random: Random, num: int, size: tuple[int, int], radius: tuple[float, float]
) -> list[tuple[float, float, float]]:
    """Centres and radii, as fractions, of things that do not touch. Radii shrink until the things fit."""
    width, height = size
    side = min(size)
    for attempt in range(400):
        scale = 0.97**attempt
        found: list[tuple[float, float, float]] = []
        for _ in range(num):
            r = float(random.uniform(*radius)) * side * scale
            x, y = float(random.uniform(1.25 * r, width - 1.25 * r)), float(random.uniform(1.25 * r, height - 1.25 * r))
            if all(math.hypot(x - a, y - b) > 1.3 * (r + c) for a, b, c in found):
                found.append((x, y, r))
        if len(found) == num:
            return [(x / width, y / height, r / side) for x, y, r in found]
    raise AssertionError(f"{num} things do not fit on {size}")


def draw_things(random: Random, things: Sequence[Thing], background: str, size: tuple[int, int]) -> Image.Image:
    """Draws two thirds of the pictures large and scales them down; the others keep Pillow's hard edges."""
    factor = 1 if random.random() < 1 / 3 else _SMOOTH
    image = Image.new("RGB", (size[0] * factor, size[1] * factor), background)
    draw = ImageDraw.Draw(image)
    for thing in things:
        radius = thing.radius * min(image.size)
        centre = (thing.x * image.width, thing.y * image.height)
        _draw_shape(draw, thing.shape, rgb(thing.color), centre, radius, random)
    return image.resize(size, Image.Resampling.LANCZOS) if factor > 1 else image


def _draw_shape(
    draw: ImageDraw.ImageDraw, shape: str, color: Color, centre: tuple[float, float], radius: float, random: Random
) -> None:
    x, y = centre
    tilt = float(random.uniform(-8, 8))
    if shape in ("circle", "ring"):
        box = (x - radius, y - radius, x + radius, y + radius)
        wall = max(2, round(radius * float(random.uniform(0.25, 0.45))))
        draw.ellipse(box, fill=color) if shape == "circle" else draw.ellipse(box, outline=color, width=wall)
    elif shape == "oval":
        flat = radius * 0.58
        is_tall = random.random() < 0.3
        half_x, half_y = (flat, radius * 1.08) if is_tall else (radius * 1.08, flat)
        draw.ellipse((x - half_x, y - half_y, x + half_x, y + half_y), fill=color)
    else:
        draw.polygon([_turned(px, py, tilt, x, y, radius) for px, py in _corners(shape)], fill=color)


def _turned(px: float, py: float, degrees: float, x: float, y: float, radius: float) -> tuple[float, float]:
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return x + radius * (px * cos - py * sin), y + radius * (px * sin + py * cos)


def _corners(shape: str) -> list[tuple[float, float]]:
    """The outline within a radius of about one, with y pointing down."""
    if shape == "square":
        return [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)]
    if shape == "rectangle":
        return [(-1.05, -0.56), (1.05, -0.56), (1.05, 0.56), (-1.05, 0.56)]
    if shape == "triangle":
        return [(0, -1), (0.87, 0.5), (-0.87, 0.5)]
    if shape == "diamond":
        return [(0, -1.05), (0.72, 0), (0, 1.05), (-0.72, 0)]
    if shape == "cross":
        a, b = 0.3, 0.95
        return [
            *((-a, -b), (a, -b), (a, -a), (b, -a), (b, a), (a, a)),
            *((a, b), (-a, b), (-a, a), (-b, a), (-b, -a), (-a, -a)),
        ]
    if shape == "star":
        turns = [math.pi * i / 5 - math.pi / 2 for i in range(10)]
        return [((1, 0.4)[i % 2] * math.cos(t), (1, 0.4)[i % 2] * math.sin(t)) for i, t in enumerate(turns)]
    assert shape == "heart", shape
    lobe = [(0.5 + 0.5 * math.cos(t), -0.35 - 0.5 * math.sin(t)) for t in np.linspace(0, math.pi, 12)]
    right = [*lobe[::-1], (0.97, -0.1), (0.75, 0.25), (0.4, 0.65), (0, 1)]
    return right + [(-x, y) for x, y in right[::-1]]


def draw_text(random: Random, text: str, font: ImageFont.FreeTypeFont, colors: tuple[str, str]) -> Image.Image:
    """A word on a picture slightly larger than it. `colors` are ink and background."""
    left, top, right, bottom = font.getbbox(text)
    width, height = right - left, bottom - top
    room_x, room_y = (float(random.uniform(0.15, 0.9)) * height for _ in range(2))
    size = (max(48, round(width + 2 * room_x)), max(48, round(height + 2 * room_y)))
    image = Image.new("RGB", size, colors[1])
    x = (size[0] - width) / 2 + float(random.uniform(-0.3, 0.3)) * room_x - left
    y = (size[1] - height) / 2 + float(random.uniform(-0.3, 0.3)) * room_y - top
    ImageDraw.Draw(image).text((x, y), text, fill=colors[0], font=font)
    return image

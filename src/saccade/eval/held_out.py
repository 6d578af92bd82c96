"""Questions in wordings that the bundled model was not trained on, and pictures of things it has never seen. Answers
are judged by their content, not by their wording."""

import importlib.util
import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from saccade.errors import ConfigError
from saccade.eval.content import PLURALS, has_facts, is_refusal, things
from saccade.eval.drawing import BACKGROUNDS, COLORS, SHAPES, Random, draw_text, pick, visible_colors
from saccade.eval.drawn import WORDS, scene
from saccade.eval.examples import Example

DESCRIBE = (
    *("What can you see here?", "Tell me about this image.", "Give a short description of the picture."),
    *("What does this photo show?", "Describe everything in this image.", "What is visible in the picture?"),
)
SHAPE_AND_COLOR = (
    *("What is its shape, and what is its color?", "Tell me its color, then its shape."),
    *("Which color and which shape do you see?", "Which shape is shown here, and in which color?"),
)
COUNT_AND_COLOR = (
    *("Count the {shapes}, then tell me their color.", "Which color are the {shapes}, and how many can you count?"),
    "How many {shapes} can you see, and what is the color of them?",
)
NUMBER_AND_COLOR = (
    *("Which number is written here, and in what color?", "Tell me the number, then its color."),
    "What color is the number, and which number is it?",
)
WORD_AND_COLOR = (
    *("Which word is written here, and in what color?", "Tell me the word, then its color."),
    "What color is the word, and what is it?",
)
SHAPE_AND_SIDE = (
    *(
        "Tell me the shape, and if it is on the left or on the right.",
        "Left or right: where is it, and what shape is it?",
    ),
    "Which shape is it, and which side is it on, left or right?",
)
NOT_KNOWN = "I do not know this picture"
PHOTOS = (
    ("sklearn", ("datasets", "images", "china.jpg")),
    ("sklearn", ("datasets", "images", "flower.jpg")),
    ("matplotlib", ("mpl-data", "sample_data", "grace_hopper.jpg")),
)


def two_questions(random: Random) -> Example:
    ask = (_shape_and_color, _count_and_color, _shape_and_side, _written)[int(random.integers(4))]
    return ask(random)


def _example(question: str, facts: tuple[str, ...], image: Image.Image) -> Example:
    return Example(question, ", ".join(facts), (image,), check=partial(has_facts, wanted=facts))


def _shape_and_color(random: Random) -> Example:
    image, (thing,) = scene(random, [pick(random, SHAPES)], (0.12, 0.4))
    return _example(pick(random, SHAPE_AND_COLOR), (thing.shape, thing.color), image)


def _count_and_color(random: Random) -> Example:
    """Two to five of a shape, among up to two of another, all in one color."""
    shape, num = pick(random, SHAPES), int(random.integers(2, 6))
    others = [pick(random, SHAPES, [shape])] * int(random.integers(0, 3))
    image, made = scene(random, [shape] * num + others, (0.07, 0.14), is_plain=True)
    question = pick(random, COUNT_AND_COLOR).replace("{shapes}", PLURALS[shape])
    return _example(question, (str(num), made[0].color), image)


def _shape_and_side(random: Random) -> Example:
    while True:
        image, (thing,) = scene(random, [pick(random, SHAPES)], (0.12, 0.22))
        if abs(thing.x - 0.5) > 0.15:
            break
    return _example(pick(random, SHAPE_AND_SIDE), (thing.shape, "right" if thing.x > 0.5 else "left"), image)


def _written(random: Random) -> Example:
    is_word = random.random() < 0.5
    text = pick(random, WORDS, [name.upper() for name in COLORS]) if is_word else str(int(random.integers(10, 1000)))
    image, color = _write(random, text)
    return _example(pick(random, WORD_AND_COLOR if is_word else NUMBER_AND_COLOR), (text, color), image)


def _write(random: Random, text: str) -> tuple[Image.Image, str]:
    font, background = ImageFont.load_default(int(random.integers(32, 90))), pick(random, BACKGROUNDS)
    assert isinstance(font, ImageFont.FreeTypeFont), "Pillow is built with FreeType"
    color = pick(random, visible_colors(background))
    return draw_text(random, text, font, (color, background)), color


def describe(random: Random) -> Example:
    """One to three things. Each must be named with its color, and nothing else may be."""
    names = [pick(random, SHAPES) for _ in range(int(random.integers(1, 4)))]
    image, made = scene(random, names, (0.12, 0.3) if len(names) == 1 else (0.1, 0.18))
    wanted = Counter((thing.color, thing.shape) for thing in made)
    answer = ", ".join(f"{color} {shape}" for color, shape in wanted.elements())
    return Example(pick(random, DESCRIBE), answer, (image,), check=lambda said: things(said) == wanted)


def unknown_photos(random: Random) -> Example:
    """Crops of photos that come with other packages."""
    files = _find_photos()
    photo = _open(files[int(random.integers(len(files)))])
    share = float(random.uniform(0.3, 1.0))
    aspect = float(np.exp(random.uniform(-0.4, 0.4)))
    width, height = (round(min(photo.size) * share * min(1.0, side)) for side in (aspect, 1 / aspect))
    left, top = (
        int(random.integers(0, whole - part + 1)) for whole, part in zip(photo.size, (width, height), strict=True)
    )
    cut = photo.crop((left, top, left + width, top + height))
    return _unknown(random, _resized(random, cut))


def unknown_pictures(random: Random) -> Example:
    """Drawn pictures of kinds that are not drawn for training: fractals, bare trees, cellular automata."""
    draw = (_fractal, _tree, _automaton)[int(random.integers(3))]
    return _unknown(random, _resized(random, draw(random)))


def _unknown(random: Random, image: Image.Image) -> Example:
    return Example(pick(random, (*DESCRIBE, *SHAPE_AND_COLOR)), NOT_KNOWN, (image,), check=is_refusal)


def known_pictures(random: Random) -> Example:
    """The control for unknown pictures: the same questions about things the model knows must not be refused."""
    kind = random.random()
    if kind < 0.3:
        image, _ = _write(random, pick(random, WORDS))
        question = pick(random, DESCRIBE)
    else:
        names = [pick(random, SHAPES) for _ in range(1 if kind < 0.7 else int(random.integers(2, 4)))]
        image, _ = scene(random, names, (0.1, 0.2))
        question = pick(random, (*DESCRIBE, *SHAPE_AND_COLOR) if len(names) == 1 else DESCRIBE)
    return Example(question, "anything but a refusal", (image,), check=lambda said: not is_refusal(said))


@cache
def _find_photos() -> tuple[Path, ...]:
    found = []
    for package, parts in PHOTOS:
        spec = importlib.util.find_spec(package)
        path = Path(spec.origin).parent.joinpath(*parts) if spec and spec.origin else None
        if path and path.is_file():
            found.append(path)
    if not found:
        raise ConfigError("the task unknown-photos needs the photos of scikit-learn or matplotlib (pip install either)")
    return tuple(found)


@cache
def _open(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")


def _resized(random: Random, image: Image.Image) -> Image.Image:
    scale = float(random.uniform(150, 400)) / max(image.size)
    size = (max(32, round(image.width * scale)), max(32, round(image.height * scale)))
    return image.resize(size, Image.Resampling.BICUBIC)


def _fractal(random: Random) -> Image.Image:
    """A Julia set, colored by how fast a point escapes."""
    at = random.uniform(0, 2 * math.pi)
    c = 0.7885 * complex(math.cos(at), math.sin(at))
    span = float(random.uniform(0.6, 1.6))
    y, x = np.mgrid[-span:span:200j, -span:span:200j]
    z, steps = x + 1j * y, np.zeros(x.shape)
    for _ in range(40):
        is_near = np.abs(z) < 4
        z = np.where(is_near, z * z + c, z)
        steps += is_near
    waves = random.uniform(0.1, 0.5, 3) * steps[..., None] + random.uniform(0, 6, 3)
    return Image.fromarray((127.5 + 127.5 * np.sin(waves)).astype(np.uint8))


def _tree(random: Random) -> Image.Image:
    sky, bark = (tuple(int(value) for value in random.integers(low, low + 120, 3)) for low in (130, 0))
    image = Image.new("RGB", (240, 240), sky)
    draw = ImageDraw.Draw(image)
    tips = [(120.0, 240.0, -math.pi / 2, float(random.uniform(45, 70)))]
    while tips:
        x, y, angle, size = tips.pop()
        end = (x + size * math.cos(angle), y + size * math.sin(angle))
        draw.line((x, y, *end), fill=bark, width=max(1, round(size / 6)))
        if size > 6:
            for side in (-1, 1):
                turned = angle + side * float(random.uniform(0.2, 0.7))
                tips.append((*end, turned, size * float(random.uniform(0.6, 0.8))))
    return image


def _automaton(random: Random) -> Image.Image:
    """Rows of cells, each made from the row above by a rule that never settles."""
    rule = (30, 45, 90, 110, 150)[int(random.integers(5))]
    row = random.integers(0, 2, 60)
    rows = []
    for _ in range(60):
        rows.append(row)
        row = (rule >> (4 * np.roll(row, 1) + 2 * row + np.roll(row, -1))) & 1
    colors = random.integers(0, 256, (2, 3)).astype(np.uint8)
    return Image.fromarray(colors[np.array(rows)]).resize((240, 240), Image.Resampling.NEAREST)


MAKERS: Mapping[str, Callable[[Random], Example]] = {
    make.__name__.replace("_", "-"): make
    for make in (two_questions, describe, unknown_photos, unknown_pictures, known_pictures)
}

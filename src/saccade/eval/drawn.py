"""Test questions for the bundled model, reproducible from a seed. Words are drawn in Pillow's font and, if installed,
matplotlib's. The model was trained on Pillow's font and DejaVu, but not on STIX and Computer Modern."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

from PIL import Image, ImageFont

from saccade.errors import ConfigError
from saccade.eval.content import PLURALS
from saccade.eval.drawing import (
    BACKGROUNDS,
    COLORS,
    SHAPES,
    Random,
    Thing,
    draw_text,
    draw_things,
    new_canvas,
    pick,
    place,
    visible_colors,
)
from saccade.eval.examples import Example

SEEN = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSansMono")
UNSEEN = ("STIXGeneral", "STIXGeneralBol", "cmr10", "cmss10")
WORDS = (
    *("CAT", "DOG", "SUN", "MAP", "BOX", "RED", "SKY", "ICE", "OWL", "KEY", "JAR", "ZOO", "VAN", "HAT", "PEN"),
    *("MOON", "FISH", "TREE", "BOOK", "DOOR", "MILK", "RAIN", "SNOW", "BIRD", "LAMP", "GOLD", "WIND", "FARM"),
    *("HOUSE", "TABLE", "RIVER", "BREAD", "CLOUD", "GREEN", "MUSIC", "STONE", "APPLE", "LIGHT", "QUICK", "JUICE"),
    *("GARDEN", "WINTER", "SILVER", "PLANET", "BRIDGE", "COFFEE", "ORANGE", "WINDOW", "YELLOW", "FOREST", "ROCKET"),
    *("GO", "UP", "NO", "HI", "ME", "TO"),
)
UNKNOWN = (
    *("Who is the mayor of Berlin?", "What is the population of Spain?", "Who painted this picture?"),
    *("How old is the man?", "What is the name of the dog?", "Where was this photo taken?", "How do I bake bread?"),
    *("What is the meaning of life?", "Tell me a story about a dragon.", "Translate house into German."),
)


def _with_article(words: str) -> str:
    return f"an {words}" if words[0] in "aeiou" else f"a {words}"


def scene(
    random: Random, names: Sequence[str], radius: tuple[float, float], *, is_plain: bool = False
) -> tuple[Image.Image, list[Thing]]:
    """Draws these shapes in visible colors, or all in one color if `is_plain`."""
    background, size = new_canvas(random)
    colors = visible_colors(background)
    if is_plain:
        colors = [pick(random, colors)]
    spots = place(random, len(names), size, radius)
    things = [Thing(name, pick(random, colors), *spot) for name, spot in zip(names, spots, strict=True)]
    return draw_things(random, things, background, size), things


def shapes(random: Random) -> Example:
    image, (thing,) = scene(random, [pick(random, SHAPES)], (0.12, 0.4))
    question = pick(random, ("What shape is this?", "Which shape do you see?", "What shape is in the picture?"))
    return Example(question, thing.shape, (image,))


def colors(random: Random) -> Example:
    if random.random() < 0.5:
        image, (thing,) = scene(random, [pick(random, SHAPES)], (0.12, 0.4))
        return Example(pick(random, ("What color is it?", "What color is the shape?")), thing.color, (image,))
    names = random.permutation(SHAPES)[: int(random.integers(2, 5))].tolist()
    image, things = scene(random, names, (0.1, 0.2))
    return Example(f"What color is the {things[0].shape}?", things[0].color, (image,))


def counts(random: Random) -> Example:
    """One to six of a shape among up to four others."""
    shape = pick(random, SHAPES)
    num = int(random.integers(1, 7))
    others = [pick(random, SHAPES, [shape]) for _ in range(int(random.integers(0, min(4, 8 - num))))]
    image, things = scene(random, [shape] * num + others, (0.07, 0.14))
    if random.random() < 0.25 and len(things) <= 6:
        return Example(pick(random, ("How many shapes are there?", "Count the shapes.")), str(len(things)), (image,))
    many = PLURALS[shape]
    question = pick(random, (f"How many {many} are there?", f"How many {many} do you see?", f"Count the {many}."))
    return Example(question, str(num), (image,))


def positions(random: Random) -> Example:
    """Left, right, above or below, only if unambiguous."""
    while True:
        names = random.permutation(SHAPES)[: int(random.integers(2, 4))].tolist()
        image, things = scene(random, names, (0.1, 0.18))
        a, b = things[0], things[1]
        dx, dy = (a.x - b.x) * image.width, (a.y - b.y) * image.height
        if max(abs(dx), abs(dy)) > 1.7 * min(abs(dx), abs(dy)) and max(abs(dx), abs(dy)) > 0.25 * min(image.size):
            break
    is_across = abs(dx) > abs(dy)
    side = ("right" if dx > 0 else "left") if is_across else ("below" if dy > 0 else "above")
    kind = int(random.integers(3))
    if kind == 0:
        return Example(f"Where is the {a.shape} relative to the {b.shape}?", side, (image,))
    if kind == 1:
        options = "left or right of" if is_across else "above or below"
        return Example(f"Is the {a.shape} {options} the {b.shape}?", side, (image,))
    asked = pick(random, ("left", "right") if is_across else ("above", "below"))
    relation = f"to the {asked} of" if is_across else asked
    return Example(f"Is the {a.shape} {relation} the {b.shape}?", "yes" if asked == side else "no", (image,))


def presence(random: Random) -> Example:
    names = random.permutation(SHAPES)[: int(random.integers(1, 5))].tolist()
    image, things = scene(random, names, (0.1, 0.2))
    is_there = random.random() < 0.5
    if random.random() < 0.5:
        shape = things[0].shape if is_there else pick(random, SHAPES, names)
        question = f"Is there {_with_article(shape)} in the picture?"
    else:
        shape, color = things[0].shape, things[0].color
        color = color if is_there else pick(random, COLORS, [color])
        question = f"Is there {_with_article(color)} {shape}?"
    return Example(question, "yes" if is_there else "no", (image,))


def pairs(random: Random) -> Example:
    if random.random() < 0.5:
        shape = pick(random, SHAPES)
        few, many = sorted(random.choice(range(1, 6), 2, replace=False).tolist())
        order = (few, many) if random.random() < 0.5 else (many, few)
        images = tuple(scene(random, [shape] * num, (0.07, 0.14))[0] for num in order)
        answer = "second" if order[1] > order[0] else "first"
        return Example(f"Which picture has more {PLURALS[shape]}?", answer, images)
    first = pick(random, SHAPES)
    second = first if random.random() < 0.5 else pick(random, SHAPES, [first])
    images = tuple(scene(random, [shape], (0.15, 0.35))[0] for shape in (first, second))
    if random.random() < 0.5:
        answer = "yes" if first == second else "no"
        return Example("Do the two pictures show the same shape?", answer, images)
    which = pick(random, ("first", "second"))
    return Example(f"What shape is in the {which} picture?", first if which == "first" else second, images)


def motion(random: Random) -> Example:
    """Two frames of a moving shape."""
    background, size = new_canvas(random)
    shape, color = pick(random, SHAPES), pick(random, visible_colors(background))
    radius = float(random.uniform(0.1, 0.18))
    way = pick(random, ("left", "right", "up", "down"))
    step, other = float(random.uniform(0.15, 0.27)), float(random.uniform(0.35, 0.65))
    ends = (0.5 - step, 0.5 + step) if way in ("right", "down") else (0.5 + step, 0.5 - step)
    seed = int(random.integers(2**31))
    frames = []
    for end in ends:
        x, y = (end, other) if way in ("left", "right") else (other, end)
        drawing = type(random)(type(random.bit_generator)(seed))  # the same for both frames
        frames.append(draw_things(drawing, [Thing(shape, color, x, y, radius)], background, size))
    question = pick(random, ("Which way does it move?", f"In which direction does the {shape} move?"))
    return Example(question, way, (frames,), kind="video")


def text(random: Random) -> Example:
    """Sums, comparisons and copies, without a picture."""
    kind = int(random.integers(3))
    a, b = int(random.integers(0, 11)), int(random.integers(0, 11))
    if kind == 0:
        return Example(pick(random, (f"What is {a} + {b}?", f"How much is {a} + {b}?")), str(a + b))
    if kind == 1:
        b = (a + 1 + int(random.integers(10))) % 11
        return Example(f"Is {a} larger than {b}?", "yes" if a > b else "no")
    word = pick(random, ("apple", "house", "river", "green", "paper", "stone", "cloud", "table", "horse", "light"))
    return Example(f"Repeat: {word}", word)


def refusal(random: Random) -> Example:
    """Questions about things the model has never seen."""
    image, _ = scene(random, [pick(random, SHAPES)], (0.15, 0.35))
    return Example(pick(random, UNKNOWN), "I do not know", (image,))


@cache
def _find_fonts(*, is_seen: bool) -> tuple[Path | None, ...]:
    """None is Pillow's own font."""
    spec = importlib.util.find_spec("matplotlib")
    folder = Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf" if spec and spec.origin else None
    found = [folder / f"{name}.ttf" for name in (SEEN if is_seen else UNSEEN)] if folder else []
    files: list[Path | None] = [path for path in found if path.is_file()]
    if is_seen:
        return (None, *files)
    if not files:
        raise ConfigError("the task new-fonts needs the fonts of matplotlib (pip install matplotlib)")
    return tuple(files)


def letter_example(random: Random, *, is_seen: bool, has_digits: bool = False) -> Example:
    """A word of two to six letters (half from a list, half random) or a number of two to four digits. `is_seen` chooses
    a font that the bundled model was trained on."""
    fonts = _find_fonts(is_seen=is_seen)
    path = fonts[int(random.integers(len(fonts)))]
    size = int(random.integers(28, 90))
    font = ImageFont.truetype(str(path), size) if path else ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont), "Pillow is built with FreeType"
    if has_digits:
        text = str(int(random.integers(10, 10000)))
    elif random.random() < 0.5:
        text = pick(random, WORDS)
    else:
        text = "".join(chr(65 + int(code)) for code in random.integers(0, 26, int(random.integers(2, 7))))
    style = random.random()
    shown = text if style < 0.5 else text.lower() if style < 0.8 else text.capitalize()
    background = pick(random, BACKGROUNDS)
    image = draw_text(random, shown, font, (pick(random, visible_colors(background)), background))
    wordings = ("What number is this?", "Read the number.") if has_digits else ("What does it say?", "Read the word.")
    return Example(pick(random, wordings), text, (image,))


MAKERS: Mapping[str, Callable[[Random], Example]] = {
    make.__name__: make for make in (shapes, colors, counts, positions, presence, pairs, motion, text, refusal)
} | {
    "words": partial(letter_example, is_seen=True),
    "new-fonts": partial(letter_example, is_seen=False),
    "numbers": partial(letter_example, is_seen=True, has_digits=True),
}

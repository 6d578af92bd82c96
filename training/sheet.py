"""Draws samples of the training data on one sheet: `python -m training.sheet --data data.safetensors --out sheet.png`.

Every picture is shown as the model sees it, with its conversation below. Look at it before a run.
"""

import argparse
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from training.backdrops import Palette
from training.batches import Recipe
from training.dialogue import Book
from training.model import FACTOR, MERGE, PATCH, Batch, Shape
from training.scenes import Studio
from training.sprites import make_bank

CELL, TEXT_HEIGHT, LINE_LETTERS = 224, 130, 40
GRIDS = ((7, 7), (6, 6), (6, 8), (4, 10), (8, 6), (5, 9))
COLUMNS = 8
MANY = 64
"""Pictures of a batch, enough to have all kinds."""


def open_recipe(data: Path) -> Recipe:
    with safe_open(data, "pt") as file:
        metadata = file.metadata()
    device, words = torch.device("cpu"), json.loads(metadata["words"])
    studio = Studio(make_bank(load_file(data), device), Palette.on(device), device)
    book = Book(Tokenizer.from_str(metadata["tokenizer"]), words, device)
    return Recipe(studio, book, Shape(), len(words), torch.float32)


def cells(recipe: Recipe, kind: str, only: str) -> Iterator[tuple[list[Image.Image], str]]:
    """Yields pictures and conversations without end; if `only` is given, only those that contain it."""
    while True:
        for grid in GRIDS:
            batch = getattr(recipe, kind)(grid, MANY)
            for index in torch.randperm(MANY)[: MANY if only else 4].tolist():
                talk = conversation(recipe, batch, index)
                if only in talk:
                    yield pictures(batch, grid, index), talk


def conversation(recipe: Recipe, batch: Batch, index: int) -> str:
    """One line for each question and answer."""
    text = recipe.book.tokenizer.decode([token for token in batch.ids[index].tolist() if token])  # 0 is padding
    return text.replace("user\n", "? ").replace("assistant\n", "= ").strip()


def pictures(batch: Batch, grid: tuple[int, int], index: int) -> list[Image.Image]:
    if batch.patches is None:
        return []
    return [_image(patches, grid) for patches in batch.patches[index]]


def _image(patches_PC: Tensor, grid: tuple[int, int]) -> Image.Image:
    """Undoes the cutting of a picture into patches, which come in groups of `MERGE` by `MERGE`."""
    rows, columns = grid
    parts = patches_PC[:, -3 * PATCH * PATCH :].reshape(rows, columns, MERGE, MERGE, 3, PATCH, PATCH)
    pixels = parts.permute(0, 2, 5, 1, 3, 6, 4).reshape(rows * FACTOR, columns * FACTOR, 3)
    return Image.fromarray(((pixels + 1) * 127.5).round().byte().numpy())


def write_sheet(recipe: Recipe, out: Path, *, kind: str, count: int, only: str = "") -> None:
    made = cells(recipe, kind, only)
    rows = -(-count // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * (CELL + 8), rows * (CELL + TEXT_HEIGHT)), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    for number in range(count):
        shown, talk = next(made)
        x, y = number % COLUMNS * (CELL + 8), number // COLUMNS * (CELL + TEXT_HEIGHT)
        for place, image in enumerate(shown):
            image.thumbnail((CELL // len(shown), CELL))
            sheet.paste(image, (x + place * CELL // len(shown), y))
        lines = [part for line in talk.splitlines() for part in textwrap.wrap(line, LINE_LETTERS)]
        draw.text((x, y + CELL), "\n".join(lines[:9]), fill="black", font=font)
    sheet.save(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kind", choices=("pictures", "pairs"), default="pictures")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--only", default="", help="only conversations with this text")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    recipe = open_recipe(options.data)
    write_sheet(recipe, options.out, kind=options.kind, count=options.count, only=options.only)


if __name__ == "__main__":
    main()
